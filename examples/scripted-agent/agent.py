#!/usr/bin/env python3
"""A scripted coding agent, recorded by ReplayFork. Python's standard library only, no network but the recorder on loopback.

It makes a git repository with a small auth package that has a real bug, and goes about fixing it in nine steps, as an agent
would: plan, read, select tests, test, ask a model (a local script), write, test again, lint, summarize. Its fix is right, and
the tests still fail: the connection pool waits AUTH_POOL_TIMEOUT seconds, and that is too long.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import model

RECORDER = os.environ.get("REPLAYFORK_RECORDER", "http://127.0.0.1:4100")
WORKSPACE = pathlib.Path(os.environ.get("REPLAYFORK_WORKSPACE", "/workspace"))
PROJECT = pathlib.Path(__file__).parent / "project"
# The whole environment of every command: nothing else leaks in, so nothing else can differ in a replay.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "AUTH_POOL_TIMEOUT": "3",
}
RUN_TESTS = "python3 run_tests.py {{ select_tests | words }}"
PACKAGE = ["auth/", "tests/", "run_tests.py"]


def post(path, body):
    request = urllib.request.Request(
        RECORDER + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        # Recording never makes the run fail.
        print(f"not recorded: {error.read().decode(errors='replace')}", file=sys.stderr)
    except OSError as error:
        print(f"not recorded: {error}", file=sys.stderr)
    return {}


class Run:
    def __init__(self):
        answer = post("/v1/runs", {"name": "scripted-agent", "agent": "scripted-agent", "model": model.NAME})
        self.id = answer.get("id", "00000000-0000-0000-0000-000000000000")
        self.outputs = {}
        self.count = 0
        print(f"run {answer.get('name', '(not recorded)')}", flush=True)

    def step(self, name, kind, do, **opening):
        """Begins a span, does the step, ends the span. `do` gives what its closing is made of."""
        self.count += 1
        span = f"{self.count:02}-{name}"
        post(f"/v1/runs/{self.id}/spans", {"spans": [{"id": span, "opening": {"name": name, "kind": kind, **opening}}]})
        closing = {"status": "Completed", "verdict": "allow", **do()}
        post(f"/v1/runs/{self.id}/spans/{span}/end", closing)
        self.outputs[name] = closing.get("output", {})
        print(f"  {name}: {closing['status']}", flush=True)
        return self.outputs[name]

    def shell(self, name, script, bindings, reads, **opening):
        executor = {"type": "shell", "script": script, "env": ENVIRONMENT, "timeout_ms": 120_000}

        def do():
            done = subprocess.run(["/bin/sh", "-c", script], cwd=WORKSPACE, env=ENVIRONMENT, capture_output=True, text=True)
            output = {"text": done.stdout, "stdout": done.stdout, "stderr": done.stderr, "exit_code": done.returncode}
            return {"status": "Completed" if done.returncode == 0 else "Failed", "output": output}

        return self.step(
            name, "ShellCommand", do, executor=executor, input_bindings=bindings, reads=reads, writes=[], arguments={"command": script}, **opening
        )

    def ask(self, name, template, prompt):
        """A model call; the model is a script, so its answer depends on the prompt alone.

        The template is bound to the place of the request that it renders, so that the call can be made again with other inputs.
        """
        request = {"model": model.NAME, "temperature": 0.2, "messages": [{"role": "user", "content": prompt}]}

        def do():
            answer = model.answer(prompt)
            spent = model.usage(prompt, answer)
            return {
                "output": {"text": answer},
                "input_tokens": spent["prompt_tokens"],
                "output_tokens": spent["completion_tokens"],
                "cost_usd": spent["cost"],
            }

        executor = {"type": "model", "provider": "scripted", "request": request}
        bindings = {"/messages/0/content": template}
        return self.step(name, "LlmCall", do, model=model.NAME, executor=executor, input_bindings=bindings)


def git(*arguments):
    identity = ["-c", "user.name=agent", "-c", "user.email=agent@example.invalid", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *arguments], cwd=WORKSPACE, env=ENVIRONMENT, check=True, capture_output=True)


def make_repository():
    # The folder itself is the volume's, and not the agent's to change.
    for entry in PROJECT.iterdir():
        copy = shutil.copytree if entry.is_dir() else shutil.copy
        copy(entry, WORKSPACE / entry.name)
    if not (WORKSPACE / ".git").exists():
        git("init")
        git("add", ".")
        git("commit", "-m", "The auth package, as the agent finds it")


def main():
    make_repository()
    run = Run()

    run.step(
        "plan", "PlannerStep",
        lambda: {"output": {"text": "1. read auth/pool.py  2. run the tests that touch it  3. fix  4. test and lint  5. summarize"}},
        arguments={"task": "Logins fail after the first one. Find out why, and fix it."},
    )
    source = run.step(
        "read_src", "FileRead",
        lambda: {"output": {"text": (WORKSPACE / "auth/pool.py").read_text()}},
        executor={"type": "file_read", "path": str(WORKSPACE / "auth/pool.py")},
    )
    tests = run.step(
        "select_tests", "ToolCall",
        lambda: {"output": {"text": "test_release test_exhausted\n"}},
        workspace="none", arguments={"touching": "auth/pool.py"},
    )
    command = f"python3 run_tests.py {' '.join(tests['text'].split())}"
    before = run.shell("test_before", command, {"script": RUN_TESTS}, PACKAGE)
    prompt = f"These tests exit with {before['exit_code']}. Fix this file and answer with it alone:\n{source['text']}"
    fix = run.ask(
        "gen_fix",
        "These tests exit with {{ test_before.exit_code }}. Fix this file and answer with it alone:\n{{ read_src }}",
        prompt,
    )

    def write():
        (WORKSPACE / "auth/pool.py").write_text(fix["text"])
        return {"output": {"text": f"wrote {len(fix['text'])} characters"}}

    run.step(
        "apply_fix", "FileWrite", write,
        executor={"type": "file_write", "path": str(WORKSPACE / "auth/pool.py"), "content": fix["text"]},
        input_bindings={"content": "{{ gen_fix }}"},
    )
    validate = run.shell("test_validate", command, {"script": RUN_TESTS}, PACKAGE)
    # What it says depends on the files alone, so a fork may take another fork's word for it.
    run.shell("lint", "python3 lint.py auth", {}, ["auth/", "lint.py"], replay_policy="Cacheable")
    run.ask(
        "summarize",
        "Say in a sentence how this went:\n{{ test_validate }}",
        f"Say in a sentence how this went:\n{validate['stdout']}",
    )
    passed = validate["exit_code"] == 0
    post(f"/v1/runs/{run.id}/finish", {"outcome": "Completed" if passed else "Failed", "decided_by": "test_validate"})
    print("the agent believes that it is done" if passed else "the agent gives up: the tests still fail", flush=True)


if __name__ == "__main__":
    main()
