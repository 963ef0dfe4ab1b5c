# What a developer types. `make help` lists it.
# A real cluster is made of namespaces of this machine, so demo, test, cluster and bench-fork run as root.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test check cluster test-clean test-mutations bench-fork bench-plan bench-snapshot web-check tools generate

# Images are built from the clone's own target folder.
unexport CARGO_TARGET_DIR
export CARGO_TERM_COLOR ?= auto

TOOL := target/debug/cluster
say = @printf '\n== %s\n'

help: ## This list
	@echo 'make TARGET, one of:'
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: tools ## From nothing to a fork and its diff; ONCE=1 ends then; CLUSTER=current REGISTRY=HOST/PATH DATABASE_URL=… uses your cluster
	@exec $(TOOL) demo

test: tools ## Everything: Rust, viewer, chart, end-to-end on a real cluster
	$(say) 'what the tests need'
	@$(TOOL) packages tests
	@$(TOOL) parts
	$(say) 'the workspace and the viewer'
	@$(TOOL) build
	@$(MAKE) --no-print-directory web-check
	$(say) 'unit tests, chart tests'
	cargo test --workspace
	$(say) 'the test cluster itself'
	cargo test --workspace --test harness
	$(say) 'end-to-end tests on a real cluster'
	cargo test --workspace --test e2e

check: tools ## The inner loop: format, lints, unit tests
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo test --workspace --lib --bins
	@$(MAKE) --no-print-directory web-check

cluster: tools ## A shell with KUBECONFIG on a fresh cluster, the chart installed
	@exec $(TOOL) shell

test-clean: tools ## In a fresh clone, demo and test twice each; fails if anything is left on the machine
	@exec $(TOOL) test-clean

test-mutations: ## Each rule of the semantics made shorter, to see the property suite fail
	cargo test --package replayfork-core --test mutations -- --ignored --nocapture

bench-fork: tools ## From apply to the first re-executed step, against a bare Job
	@$(TOOL) packages
	@$(TOOL) parts
	@$(TOOL) build --release
	cargo run --release --package replayfork-tests --bin bench-fork

bench-plan: ## Plans of 1e5 and 1e6 spans out of a real Postgres, against a recursive query and a bare BFS; DEV=1 is quicker to build
	cargo run $(if $(DEV),,--release) --package replayfork-tests --bin bench-plan

bench-snapshot: ## Snapshots against tar+zstd, git, restic, borg, cp and floors; needs root; ROUNDS=1 is quicker
	apt-get install --yes --quiet=2 --no-install-recommends git restic borgbackup zstd time e2fsprogs postgresql
	cargo bench --package replayfork-snapshot --bench snapshot -- --rounds=$(or $(ROUNDS),3)
	cargo run --release --package replayfork-tests --bin bench-upload -- --rounds=$(or $(ROUNDS),3) target/bench/snapshot/home/registry/src/*

generate: ## What is generated from the types and committed: CRD, OpenAPI document, the viewer's types
	cargo build --workspace
	target/debug/crdgen > crds/replayforks.yaml
	cp crds/replayforks.yaml charts/replayfork/files/replayforks.yaml
	target/debug/replayfork-api-server --openapi > web/openapi.json
	cd web && npm ci && npm run generate

web-check:
	@if [ -f web/package.json ]; then \
	  printf '\n== the viewer: types, lints, tests\n'; \
	  $(TOOL) viewer-packages; \
	  cd web && npm run --if-present check && npm test; \
	fi

tools:
	@cargo build --package replayfork-test-cluster
