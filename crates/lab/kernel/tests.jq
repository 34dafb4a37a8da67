# Of what `cargo test --no-run --message-format=json` says, the test programs that $wanted names: "CRATE/NAME FILE" of each.
select(.executable and (.target.kind | index("test"))?)
| ["\(.manifest_path | split("/")[-2])/\(.target.name)", .executable]
| select(.[0] as $name | $wanted | split(" ") | index($name))
| join(" ")
