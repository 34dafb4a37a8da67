# From `cargo metadata` to a software bill of materials (CycloneDX 1.5): every crate that is linked into the program, with its
# version, licence and checksum-free package URL. Input order does not matter, and two runs give the same text.
#
#   cargo metadata ... | jq -S --arg root sidetrack -f sbom.jq

# The packages that `$start` reaches by normal dependencies.
def reached($graph; $start):
    { seen: {}, todo: [$start] }
    | until(.todo == [];
        .todo[0] as $id
        | .todo |= .[1:]
        | if .seen[$id] then . else .seen[$id] = true | .todo += ($graph[$id] // []) end)
    | .seen;

(.resolve.nodes
    | map({ key: .id, value: [.deps[] | select(any(.dep_kinds[]; .kind == null)) | .pkg] })
    | from_entries) as $graph
| (.packages[] | select(.name == $root and .source == null)) as $program
| reached($graph; $program.id) as $linked
| {
    bomFormat: "CycloneDX",
    specVersion: "1.5",
    version: 1,
    metadata: {
        component: {
            type: "application",
            name: $program.name,
            version: $program.version,
            licenses: [{ expression: $program.license }]
        }
    },
    components: ([
        .packages[]
        | select($linked[.id] and .id != $program.id)
        | {
            type: "library",
            name,
            version,
            purl: "pkg:cargo/\(.name)@\(.version)",
            licenses: [{ expression: ((.license // "NOASSERTION") | gsub("/"; " OR ")) }]
        }
    ] | sort_by(.name, .version))
}
