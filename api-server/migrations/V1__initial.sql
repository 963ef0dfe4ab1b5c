-- Runs and spans. A run is known inside by `rid`: database milliseconds << 20 | counter, so that list order, keyset
-- paging and monthly partitions all follow from it.

CREATE SEQUENCE run_counter;
CREATE FUNCTION next_rid() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT ((extract(epoch FROM clock_timestamp()) * 1000)::bigint << 20) | (nextval('run_counter') & 1048575)
$$;

-- Blobs are deduplicated per Kubernetes namespace; `ns` is its number.
CREATE TABLE namespaces (
  ns int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text NOT NULL UNIQUE
);

CREATE TABLE runs (
  rid bigint PRIMARY KEY DEFAULT next_rid(),
  id uuid NOT NULL UNIQUE,
  ns int NOT NULL REFERENCES namespaces,
  name text NOT NULL,
  kind text NOT NULL CHECK (kind IN ('recorded', 'imported', 'fork')),
  state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'finished', 'sealed', 'deleted')),
  origin text,
  agent text NOT NULL,
  model text,
  session text,
  labels jsonb NOT NULL DEFAULT '{}',
  environment jsonb NOT NULL DEFAULT '{}',
  outcome smallint,
  decided_by text,
  started bigint NOT NULL,
  ended bigint,
  rev bigint NOT NULL DEFAULT 0,
  segments int NOT NULL DEFAULT 0,
  spans int NOT NULL DEFAULT 0,
  tokens bigint,
  cost_usd double precision,
  -- A fork's rows are read over those of its base, which is never a fork itself.
  base_rid bigint REFERENCES runs,
  forked_from jsonb,
  -- Output, file and snapshot patches that a fork of this fork takes over, each with its target's id.
  inherits jsonb NOT NULL DEFAULT '[]',
  late_spans int NOT NULL DEFAULT 0,
  last_at timestamptz NOT NULL DEFAULT now(),
  goodbye_at timestamptz,
  deleted_at timestamptz,
  UNIQUE (ns, origin),
  CHECK ((kind = 'fork') = (base_rid IS NOT NULL))
) WITH (fillfactor = 50);
CREATE INDEX runs_by_namespace ON runs (ns, rid DESC) WHERE state <> 'deleted';
CREATE UNIQUE INDEX runs_by_name ON runs (ns, name) WHERE state <> 'deleted';
CREATE INDEX runs_by_base ON runs (base_rid) WHERE base_rid IS NOT NULL;
CREATE INDEX runs_unsealed ON runs (last_at) WHERE state IN ('open', 'finished') AND kind = 'recorded';

CREATE TABLE run_deps (
  rid bigint NOT NULL REFERENCES runs,
  needs bigint NOT NULL REFERENCES runs,
  PRIMARY KEY (rid, needs)
);
CREATE INDEX run_deps_by_needs ON run_deps (needs);

-- `ord` is NULL while only a span's closing has arrived; readers don't see such rows. The payloads are at
-- (pay_rid, in_segment, in_at) and (pay_rid, out_segment, out_at), or blobs where they are large.
CREATE TABLE spans (
  rid bigint NOT NULL,
  span_id text COLLATE "C" NOT NULL,
  ord bigint,
  parent_id text COLLATE "C",
  rev bigint NOT NULL,
  kind smallint,
  status smallint NOT NULL,
  verdict smallint NOT NULL DEFAULT 0,
  fidelity smallint NOT NULL DEFAULT 0,
  started bigint,
  ended bigint,
  name text,
  model text,
  tokens_in bigint,
  tokens_out bigint,
  cost_usd double precision,
  input_digest bytea,
  blocked jsonb,
  -- Of a check: whether the step gave what it gave when recorded.
  reproduced boolean,
  pay_rid bigint NOT NULL,
  in_segment int, in_at int, in_len int, in_blob bytea,
  out_segment int, out_at int, out_len int, out_blob bytea,
  PRIMARY KEY (rid, span_id)
) PARTITION BY RANGE (rid);
CREATE UNIQUE INDEX spans_in_order ON spans (rid, ord, span_id);
CREATE INDEX spans_by_parent ON spans (rid, parent_id, ord);
CREATE INDEX spans_by_name ON spans (rid, name, ord);
CREATE INDEX spans_with_blobs ON spans (rid) WHERE in_blob IS NOT NULL OR out_blob IS NOT NULL;

CREATE TABLE span_events (
  rid bigint NOT NULL,
  span_id text COLLATE "C" NOT NULL,
  event bytea NOT NULL,
  at bigint NOT NULL,
  segment int NOT NULL,
  pos int NOT NULL,
  len int NOT NULL,
  PRIMARY KEY (rid, span_id, event)
) PARTITION BY RANGE (rid);

CREATE TABLE span_edges (
  rid bigint NOT NULL,
  span_id text COLLATE "C" NOT NULL,
  needs text COLLATE "C" NOT NULL,
  via text NOT NULL,
  PRIMARY KEY (rid, span_id, needs, via)
) PARTITION BY RANGE (rid);

-- One zstd frame of at most 256 KiB of payloads, immutable.
CREATE TABLE segments (
  rid bigint NOT NULL,
  segment int NOT NULL,
  raw_len int NOT NULL,
  data bytea NOT NULL,
  PRIMARY KEY (rid, segment)
) PARTITION BY RANGE (rid);

-- What planning reads of a sealed run: numbers in place of records, made once from its spans when it is first planned, and anew
-- where another version made them. Parts: 0 what every walk reads, 1 streams of 4096 spans each, 2 paths by their digests in 256 lists, 3 requests of
-- model calls, 4 ids and names of 512 spans each; part 0 is written last. 5 is what a diff reads, 4096 spans each, the first of them written last.
CREATE TABLE run_graphs (
  rid bigint NOT NULL REFERENCES runs,
  part smallint NOT NULL,
  n int NOT NULL,
  -- Of ids and names, the first span.
  first_ord bigint,
  first_id text COLLATE "C",
  data bytea NOT NULL,
  PRIMARY KEY (rid, part, n)
);
ALTER TABLE run_graphs ALTER data SET STORAGE EXTERNAL;

-- Makes the partitions of the month that `at` lies in; harmless where they exist.
CREATE FUNCTION make_partitions(at timestamptz) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  first timestamptz := date_trunc('month', at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC';
  past timestamptz := (date_trunc('month', at AT TIME ZONE 'UTC') + interval '1 month') AT TIME ZONE 'UTC';
  parent text;
  part text;
BEGIN
  FOREACH parent IN ARRAY ARRAY['spans', 'span_events', 'span_edges', 'segments'] LOOP
    part := parent || '_' || to_char(first AT TIME ZONE 'UTC', 'YYYYMM');
    CONTINUE WHEN to_regclass(part) IS NOT NULL;
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS) WITH (fillfactor = %s)',
      part, parent, CASE parent WHEN 'spans' THEN 60 ELSE 100 END);
    IF parent = 'segments' THEN
      EXECUTE format('ALTER TABLE %I ALTER data SET STORAGE EXTERNAL', part);
    END IF;
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', parent, part,
      (extract(epoch FROM first) * 1000)::bigint << 20, (extract(epoch FROM past) * 1000)::bigint << 20);
  END LOOP;
END $$;

-- Workspace states beside spans: of a recorded span, or of a fork where they differ from the recorded ones.
CREATE TABLE snapshots (
  rid bigint NOT NULL REFERENCES runs,
  span_id text COLLATE "C" NOT NULL,
  edge char(1) NOT NULL CHECK (edge IN ('b', 'a')),
  node bytea,
  content bytea,
  missing text,
  -- Taken over from the fork that this run forks.
  inherited boolean NOT NULL DEFAULT false,
  PRIMARY KEY (rid, span_id, edge),
  CHECK ((node IS NULL) = (content IS NULL) AND (node IS NULL) = (missing IS NOT NULL))
);

CREATE INDEX snapshots_by_content ON snapshots (content);

-- The folder of an object store that is this database's.
CREATE TABLE database_identity (id uuid NOT NULL DEFAULT gen_random_uuid());
INSERT INTO database_identity DEFAULT VALUES;

-- Packs of blobs. No foreign key and no index from blobs to packs: collection walks packs.
CREATE TABLE packs (
  ns int NOT NULL,
  pack bigint GENERATED ALWAYS AS IDENTITY,
  size int NOT NULL,
  data bytea,
  -- In an object store: a name below the folder of this database, which begins with the transaction that wrote it.
  object text COLLATE "C",
  -- Its object is gone from the store.
  lost boolean NOT NULL DEFAULT false,
  PRIMARY KEY (ns, pack),
  CHECK ((data IS NULL) <> (object IS NULL))
);
CREATE UNIQUE INDEX packs_by_object ON packs (object) WHERE object IS NOT NULL;
ALTER TABLE packs ALTER data SET STORAGE EXTERNAL;

CREATE TABLE blobs (
  ns int NOT NULL,
  digest bytea NOT NULL,
  kind smallint NOT NULL,
  pack bigint NOT NULL,
  frame_at int NOT NULL,
  frame_len int NOT NULL,
  raw_at int NOT NULL,
  raw_len int NOT NULL,
  born xid8 NOT NULL DEFAULT pg_current_xact_id(),
  condemned boolean NOT NULL DEFAULT false,
  PRIMARY KEY (ns, digest)
);
CREATE INDEX blobs_condemned ON blobs (ns) WHERE condemned;

-- Forks, by the uid of their custom resource: registered, claimed, terminal, each a compare-and-set.
CREATE TABLE forks (
  uid uuid PRIMARY KEY,
  ns int NOT NULL REFERENCES namespaces,
  name text NOT NULL,
  spec jsonb NOT NULL,
  spec_digest bytea NOT NULL,
  state text NOT NULL DEFAULT 'registered' CHECK (state IN ('registered', 'claimed', 'terminal')),
  source_rid bigint REFERENCES runs,
  fork_rid bigint REFERENCES runs ON DELETE SET NULL,
  plan jsonb,
  -- Places in the source's order of all spans of the plan: 32 bits each, little-endian.
  planned bytea,
  plan_digest bytea,
  environment jsonb,
  pod_uid text,
  claim bytea,
  cancel_requested_at timestamptz,
  deletion_policy text NOT NULL,
  reason text,
  result jsonb,
  registered_at timestamptz NOT NULL DEFAULT now(),
  claimed_at timestamptz,
  terminal_at timestamptz,
  cr_gone_at timestamptz,
  CHECK ((state = 'terminal') = (reason IS NOT NULL AND result IS NOT NULL)),
  CHECK (state <> 'claimed' OR claim IS NOT NULL)
);
CREATE INDEX forks_open ON forks (registered_at) WHERE state <> 'terminal';
CREATE INDEX forks_by_source ON forks (source_rid);

CREATE FUNCTION guard_fork() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF OLD.state = 'terminal' AND (NEW.state, NEW.reason, NEW.result) IS DISTINCT FROM (OLD.state, OLD.reason, OLD.result) THEN
    RAISE EXCEPTION 'fork % is terminal', OLD.uid USING errcode = 'RF001';
  END IF;
  IF OLD.claim IS NOT NULL AND NEW.claim IS DISTINCT FROM OLD.claim THEN
    RAISE EXCEPTION 'fork % is claimed', OLD.uid USING errcode = 'RF002';
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER guard_fork BEFORE UPDATE ON forks FOR EACH ROW EXECUTE FUNCTION guard_fork();

CREATE TABLE fork_steps (
  uid uuid NOT NULL REFERENCES forks ON DELETE CASCADE,
  span_id text COLLATE "C" NOT NULL,
  state text NOT NULL CHECK (state IN ('begun', 'ended')),
  begun_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (uid, span_id)
);

-- The result cache: under the digest of all inputs, the fork's span that was executed with them.
CREATE TABLE results (
  ns int NOT NULL,
  key bytea NOT NULL,
  rid bigint NOT NULL REFERENCES runs,
  span_id text COLLATE "C" NOT NULL,
  PRIMARY KEY (ns, key)
);
CREATE INDEX results_by_run ON results (rid);

-- Contents sent for patches, kept for a day unless a fork is registered that names them.
CREATE TABLE uploads (
  ns int NOT NULL,
  digest bytea NOT NULL,
  size bigint NOT NULL,
  uploaded_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (ns, digest)
);
CREATE TABLE fork_blobs (
  uid uuid NOT NULL REFERENCES forks ON DELETE CASCADE,
  digest bytea NOT NULL,
  PRIMARY KEY (uid, digest)
);

-- What a model's endpoint was asked for a step of a fork: once.
CREATE TABLE fork_answers (
  uid uuid NOT NULL REFERENCES forks ON DELETE CASCADE,
  span_id text COLLATE "C" NOT NULL,
  asked_at timestamptz NOT NULL DEFAULT now(),
  answer jsonb,
  PRIMARY KEY (uid, span_id)
);
