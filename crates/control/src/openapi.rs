//! The OpenAPI 3.1 documents of both interfaces, made from their Rust types.

use super::api::{
    AccessRequest, Application, ApplicationStatus, Configuration, Configured, ConsentChange, Offer, Planned,
    Progress, Refusal, Report, Shipment, Shipped,
};
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

/// One operation.
struct Operation {
    path: &'static str,
    method: &'static str,
    id: &'static str,
    summary: &'static str,
    /// A parameter of the query, with its description.
    query: Option<(&'static str, &'static str)>,
    takes: Option<Value>,
    takes_media: &'static str,
    gives: Value,
    media: &'static str,
}

struct Document {
    schemas: SchemaGenerator,
    operations: Vec<Operation>,
}

impl Document {
    fn new() -> Self {
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
        });
        Self { schemas: settings.into_generator(), operations: Vec::new() }
    }

    fn of<T: JsonSchema>(&mut self) -> Value {
        self.schemas.subschema_for::<T>().into()
    }

    fn add(
        &mut self,
        method: &'static str,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
        takes: Option<Value>,
        gives: Value,
    ) {
        self.operations.push(Operation {
            path,
            method,
            id,
            summary,
            query: None,
            takes,
            takes_media: "application/json",
            gives,
            media: "application/json",
        });
    }

    fn finish(mut self, title: &str) -> Value {
        let refusal = self.of::<Refusal>();
        let mut paths: Map<String, Value> = Map::new();
        for operation in &self.operations {
            let path = paths.entry(operation.path).or_insert_with(|| json!({}));
            path[operation.method] = described(operation, &refusal);
        }
        let schemas = self.schemas.take_definitions(true);
        json!({
            "openapi": "3.1.0",
            "info": {
                "title": title,
                "version": env!("CARGO_PKG_VERSION"),
                "description": "HTTP/2 over TLS 1.3; both ends show certificates. Errors are a Refusal.",
            },
            "paths": paths,
            "components": { "schemas": schemas },
        })
    }
}

fn described(operation: &Operation, refusal: &Value) -> Value {
    let mut parameters: Vec<_> = operation
        .path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
        .map(|name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }))
        .collect();
    parameters.extend(operation.query.map(|(name, about)| {
        json!({ "name": name, "in": "query", "description": about, "schema": { "type": "string" } })
    }));
    let mut described = json!({
        "operationId": operation.id,
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {
            "200": { "description": "done", "content": { operation.media: { "schema": operation.gives } } },
            "default": { "description": "refused", "content": { "application/json": { "schema": refusal } } },
        },
    });
    if let Some(body) = &operation.takes {
        described["requestBody"] =
            json!({ "required": true, "content": { operation.takes_media: { "schema": body } } });
    }
    described
}

/// The interface of an orchestrator.
pub fn orchestrator() -> Value {
    let mut document = Document::new();
    let nothing = json!({ "type": "null" });
    let (application, status) = (document.of::<Application>(), document.of::<ApplicationStatus>());
    let (progress, consent) = (document.of::<Progress>(), document.of::<ConsentChange>());
    let about = "Sets an application up; one line of JSON for each of the eight steps, as they are done";
    document.add("post", "/v1/applications", "submit", about, Some(application), progress);
    if let Some(submit) = document.operations.last_mut() {
        submit.media = "application/x-ndjson";
    }
    let list = json!({ "type": "array", "items": status });
    document.add(
        "get",
        "/v1/applications",
        "list",
        "The applications of the member that asks; an operator gets those of all",
        None,
        list,
    );
    document.add("get", "/v1/applications/{name}", "show", "One application", None, status);
    let about = "The steps of the latest 64 set-ups of this orchestrator since its start: those of the member that asks; an operator gets \
                 those of all";
    let reports = json!({ "type": "array", "items": document.of::<Report>() });
    document.add("get", "/v1/progress", "progress", about, None, reports);
    let about = "Ends an application; what was done for it is taken back";
    document.add("delete", "/v1/applications/{name}", "end", about, None, nothing.clone());
    let (application, planned) = (document.of::<Application>(), document.of::<Planned>());
    let about = "Says what would be done for an application, and why; does nothing";
    document.add("post", "/v1/plan", "plan", about, Some(application), planned);
    let about = "The agent of the party that has the data says whether consent holds";
    document.add("put", "/v1/consent/{data}", "consent", about, Some(consent), nothing);
    document.finish("sidetrack orchestrate")
}

/// The interface of a domain's agent.
pub fn domain() -> Value {
    let mut document = Document::new();
    let nothing = json!({ "type": "null" });
    let (access, offer) = (document.of::<AccessRequest>(), document.of::<Offer>());
    let (shipment, configuration) = (document.of::<Shipment>(), document.of::<Configuration>());
    let (configured, consent) = (document.of::<Configured>(), document.of::<ConsentChange>());
    let about = "Asks for access; it is granted or refused";
    document.add("post", "/v1/applications", "grant", about, Some(access), nothing.clone());
    let list = json!({ "type": "array", "items": { "type": "object" } });
    document.add("get", "/v1/applications", "list", "What was granted, and what is configured", None, list);
    document.add("get", "/v1/nodes", "nodes", "The nodes and functions that are offered", None, offer);
    let about =
        "Sees to it that the proxies have these functions, or says which images have to be sent first";
    let shipped = document.of::<Shipped>();
    document.add("put", "/v1/applications/{name}/functions", "ship", about, Some(shipment), shipped);
    let about = "Takes the archive of an image that the domain's file names by this digest (docker-archive, as it is)";
    let archive = json!({ "type": "string", "format": "binary" });
    document.add(
        "put",
        "/v1/applications/{name}/images/{id}",
        "receive",
        about,
        Some(archive),
        nothing.clone(),
    );
    if let Some(receive) = document.operations.last_mut() {
        receive.takes_media = "application/x-tar";
    }
    let about = "What the proxies let through for an application, of what was granted";
    document.add(
        "put",
        "/v1/applications/{name}/policy",
        "configure",
        about,
        Some(configuration),
        configured.clone(),
    );
    let about = "The application is ready: it stays until it is ended";
    document.add("post", "/v1/applications/{name}/ready", "ready", about, None, nothing);
    let about = "Ends an application here; flows of it end";
    document.add("delete", "/v1/applications/{name}", "end", about, None, configured.clone());
    let about = "An operator says whether consent holds; flows without it end";
    document.add("put", "/v1/consent/{data}", "consent", about, Some(consent), configured);
    for operation in document.operations.iter_mut().filter(|operation| operation.path.contains("{name}")) {
        let about =
            "The identity of the submission, as it asked for access; the request reaches no other one";
        operation.query = Some(("id", about));
    }
    document.finish("sidetrack domain")
}
