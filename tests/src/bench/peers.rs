//! What is measured against: of a plan the recursive query over a table of edges, and a BFS over them in memory; of a diff the join.

use anyhow::Result;
use deadpool_postgres::Object;

/// Edges in both directions of reading: by the step that others use.
pub struct Adjacency {
    starts: Vec<u32>,
    users: Vec<u32>,
}

impl Adjacency {
    pub async fn load(client: &Object, rid: i64, steps: usize) -> Result<Self> {
        let rows = client.query("SELECT src_n, dst_n FROM bench_edges WHERE rid = $1", &[&rid]).await?;
        let mut edges: Vec<(u32, u32)> = rows.iter().map(|r| (r.get::<_, i32>(0) as u32, r.get::<_, i32>(1) as u32)).collect();
        edges.sort_unstable();
        let mut starts = vec![0; steps + 1];
        edges.iter().for_each(|(from, _)| starts[*from as usize + 1] += 1);
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        Ok(Self { starts, users: edges.into_iter().map(|(_, to)| to).collect() })
    }

    pub fn edges(&self) -> usize {
        self.users.len()
    }

    /// How many steps are reached, the first one too.
    pub fn bfs(&self, from: usize) -> usize {
        let mut seen = vec![0u64; self.starts.len() / 64 + 1];
        let mut queue = vec![from as u32];
        seen[from / 64] |= 1 << (from % 64);
        let mut next = 0;
        while let Some(&at) = queue.get(next) {
            next += 1;
            for &user in &self.users[self.starts[at as usize] as usize..self.starts[at as usize + 1] as usize] {
                let (word, bit) = (user as usize / 64, 1 << (user % 64));
                if seen[word] & bit == 0 {
                    seen[word] |= bit;
                    queue.push(user);
                }
            }
        }
        queue.len()
    }
}

/// Ids alone, counted in the server.
pub async fn recursive(client: &Object, rid: i64, id: &str) -> Result<i64> {
    let sql = "WITH RECURSIVE reached(id) AS (SELECT $2::text COLLATE \"C\" UNION SELECT e.dst FROM reached r JOIN bench_edges e ON e.rid = $1 AND e.src = r.id)
        SELECT count(*) FROM reached";
    Ok(client.query_one(sql, &[&rid, &id]).await?.get(0))
}

/// The same by number.
pub async fn recursive_numbers(client: &Object, rid: i64, step: usize) -> Result<i64> {
    let sql = "WITH RECURSIVE reached(n) AS (SELECT $2::int UNION SELECT e.dst_n FROM reached r JOIN bench_edges e ON e.rid = $1 AND e.src_n = r.n)
        SELECT count(*) FROM reached";
    Ok(client.query_one(sql, &[&rid, &(step as i32)]).await?.get(0))
}

/// With what a plan lists of each span, the first 1,000 of them in order.
pub async fn recursive_named(client: &Object, rid: i64, id: &str) -> Result<usize> {
    let sql = "WITH RECURSIVE reached(id) AS (SELECT $2::text COLLATE \"C\" UNION SELECT e.dst FROM reached r JOIN bench_edges e ON e.rid = $1 AND e.src = r.id)
        SELECT s.span_id, s.name, s.kind FROM reached JOIN spans s ON s.rid = $1 AND s.span_id = reached.id ORDER BY s.ord, s.span_id LIMIT 1000";
    Ok(client.query(sql, &[&rid, &id]).await?.len())
}

/// Steps that differ: the same kind, name and input, the first with the first, the second with the second; or on one side only.
pub async fn join(client: &Object, a: i64, b: i64) -> Result<usize> {
    let side = |n: u8| {
        format!(
            "SELECT span_id, kind, name, asked, gave, row_number() OVER (PARTITION BY kind, name, asked ORDER BY ord) AS nth FROM bench_steps WHERE rid = ${n}"
        )
    };
    let sql = format!(
        "SELECT a.span_id, b.span_id FROM ({}) a FULL JOIN ({}) b USING (kind, name, asked, nth) WHERE a.gave IS DISTINCT FROM b.gave",
        side(1),
        side(2)
    );
    Ok(client.query(&sql, &[&a, &b]).await?.len())
}
