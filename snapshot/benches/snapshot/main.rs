//! Snapshots against the tools that people would use instead, and against floors.

mod one;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    match args.split_first() {
        Some((first, rest)) if first == "one" => one::run(rest.first().map_or("", |w| w), rest.get(1..).unwrap_or_default()),
        _ => Err("nothing to do".into()),
    }
}
