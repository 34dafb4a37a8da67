//! As much of JSON Schema (draft 2020-12) as our documents use: whether a value fits a schema, and made-up values that do.
//!
//! The check is strict: an object may have only the properties that its schema names, so that no field is missing in a document.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The words that this check knows. It refuses others, because it would pass what they forbid.
const KNOWN: [&str; 21] = [
    "$ref",
    "$schema",
    "additionalProperties",
    "allOf",
    "anyOf",
    "default",
    "description",
    "enum",
    "examples",
    "format",
    "items",
    "maxItems",
    "maximum",
    "minItems",
    "minimum",
    "oneOf",
    "prefixItems",
    "properties",
    "required",
    "title",
    "type",
];

/// The OpenAPI document of the admin interface.
pub(crate) fn openapi() -> Value {
    serde_json::from_str(sidetrack::admin::OPENAPI).expect("docs/openapi.json is JSON")
}

/// The schema of a good answer: of the path as the document has it, and the method in small letters.
pub(crate) fn answer_schema<'a>(document: &'a Value, method: &str, path: &str) -> &'a Value {
    let content = &document["paths"][path][method]["responses"]["200"]["content"];
    let kinds = content.as_object().unwrap_or_else(|| panic!("{method} {path} is not in docs/openapi.json"));
    &kinds.values().next().expect("one kind of content")["schema"]
}

/// The schema of this name in an OpenAPI document.
pub(crate) fn named(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// Follows references within the document `root`.
pub(crate) fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(place) => {
            let target = place.strip_prefix('#').and_then(|place| root.pointer(place));
            resolved(root, target.unwrap_or_else(|| panic!("{place} is not there")))
        }
        None => schema,
    }
}

/// What of a value does not fit a schema of the document `root`. Empty: all fits.
pub(crate) fn mismatches(root: &Value, schema: &Value, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    check(root, schema, value, "", &mut found);
    found
}

fn list<'a>(schema: &'a Value, word: &str) -> Option<&'a Vec<Value>> {
    schema[word].as_array()
}

fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(only) => vec![only.as_str()],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn is_of(kind: &str, value: &Value) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("'{other}' is not a type"),
    }
}

fn check(root: &Value, schema: &Value, value: &Value, place: &str, found: &mut Vec<String>) {
    let schema = resolved(root, schema);
    let rules = schema.as_object().expect("a schema is an object");
    if let Some(unknown) = rules.keys().find(|word| !KNOWN.contains(&word.as_str())) {
        panic!("{place}: this check does not know '{unknown}'");
    }
    for word in ["oneOf", "anyOf"] {
        let Some(choices) = list(schema, word) else { continue };
        let fitting = choices.iter().filter(|choice| mismatches(root, choice, value).is_empty()).count();
        if fitting == 0 || (fitting > 1 && word == "oneOf") {
            found.push(format!("{place}: {fitting} choices of {word} fit {value}"));
        }
    }
    let types = types(schema);
    if !types.is_empty() && !types.iter().any(|kind| is_of(kind, value)) {
        found.push(format!("{place}: {value} is not of type {types:?}"));
        return;
    }
    if list(schema, "enum").is_some_and(|words| !words.contains(value)) {
        found.push(format!("{place}: {value} is not in the list"));
    }
    let number = value.as_f64();
    let bound = |word: &str| schema[word].as_f64().zip(number);
    if bound("minimum").is_some_and(|(least, number)| number < least)
        || bound("maximum").is_some_and(|(most, number)| number > most)
    {
        found.push(format!("{place}: {value} is out of bounds"));
    }
    if let (Some("date-time"), Some(text)) = (schema["format"].as_str(), value.as_str())
        && humantime::parse_rfc3339(text).is_err()
    {
        found.push(format!("{place}: {text} is not a time"));
    }
    match value {
        Value::Object(object) => check_object(root, schema, object, place, found),
        Value::Array(items) => check_items(root, schema, items, place, found),
        _ => {}
    }
}

/// The properties and the required ones of an object, with those of `allOf`.
#[derive(Default)]
struct Members<'a> {
    properties: BTreeMap<&'a str, &'a Value>,
    required: Vec<&'a str>,
    /// Whether it names properties at all.
    is_closed: bool,
}

impl<'a> Members<'a> {
    fn add(&mut self, root: &'a Value, schema: &'a Value) {
        let schema = resolved(root, schema);
        if let Some(properties) = schema["properties"].as_object() {
            self.is_closed = true;
            self.properties.extend(properties.iter().map(|(name, of)| (name.as_str(), of)));
        }
        self.required.extend(list(schema, "required").into_iter().flatten().filter_map(Value::as_str));
        for part in list(schema, "allOf").into_iter().flatten() {
            self.add(root, part);
        }
    }

    fn of(root: &'a Value, schema: &'a Value) -> Self {
        let mut members = Self::default();
        members.add(root, schema);
        members
    }
}

fn check_object(
    root: &Value,
    schema: &Value,
    object: &Map<String, Value>,
    place: &str,
    found: &mut Vec<String>,
) {
    let members = Members::of(root, schema);
    for name in members.required.iter().filter(|name| !object.contains_key(**name)) {
        found.push(format!("{place}: '{name}' is missing"));
    }
    for (name, value) in object {
        let inner = format!("{place}/{name}");
        let others = &schema["additionalProperties"];
        match members.properties.get(name.as_str()) {
            Some(property) => check(root, property, value, &inner, found),
            None if others.is_object() => check(root, others, value, &inner, found),
            None if members.is_closed => found.push(format!("{inner} is not in the schema")),
            None => {}
        }
    }
}

fn check_items(root: &Value, schema: &Value, items: &[Value], place: &str, found: &mut Vec<String>) {
    let bound = |word: &str| schema[word].as_u64().map(|bound| bound as usize);
    if bound("minItems").is_some_and(|least| items.len() < least)
        || bound("maxItems").is_some_and(|most| items.len() > most)
    {
        found.push(format!("{place}: {} items", items.len()));
    }
    let first = list(schema, "prefixItems").map_or(&[][..], Vec::as_slice);
    for (at, item) in items.iter().enumerate() {
        let of = first.get(at).unwrap_or(&schema["items"]);
        if of.is_object() {
            check(root, of, item, &format!("{place}/{at}"), found);
        }
    }
}

/// A made-up value that fits a schema, with all properties. Other values of `pick` choose other words, types and shapes.
pub(crate) fn sample(root: &Value, schema: &Value, pick: usize) -> Value {
    let schema = resolved(root, schema);
    if let Some(choices) = list(schema, "oneOf").or(list(schema, "anyOf")) {
        return sample(root, &choices[pick % choices.len()], pick / choices.len());
    }
    if let Some(words) = list(schema, "enum") {
        return words[pick % words.len()].clone();
    }
    let types = types(schema);
    assert!(!types.is_empty(), "a schema without a type: {schema}");
    let (kind, pick) = (types[pick % types.len()], pick / types.len());
    let example = list(schema, "examples").map(|examples| examples[pick % examples.len()].clone());
    match kind {
        "null" => Value::Null,
        "boolean" => json!(pick.is_multiple_of(2)),
        "integer" => json!(schema["minimum"].as_u64().unwrap_or(0).max(1)),
        "number" => json!(0.5),
        "string" => example.unwrap_or_else(|| json!("text")),
        "array" => match list(schema, "prefixItems") {
            Some(items) => items.iter().map(|item| sample(root, item, pick)).collect(),
            None => {
                let count = schema["minItems"].as_u64().unwrap_or(1);
                (0..count).map(|_| sample(root, &schema["items"], pick)).collect()
            }
        },
        "object" => {
            let properties = Members::of(root, schema).properties;
            let mut object: Map<_, _> =
                properties.into_iter().map(|(name, of)| (name.to_owned(), sample(root, of, pick))).collect();
            if schema["additionalProperties"].is_object() {
                object.insert("name".to_owned(), sample(root, &schema["additionalProperties"], pick));
            }
            object.into()
        }
        other => panic!("'{other}' is not a type"),
    }
}
