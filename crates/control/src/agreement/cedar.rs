//! The reasoner: agreements become policies of Cedar, facts become its entities. Agreements permit or forbid.
//! What no agreement permits is forbidden, and so is everything if an agreement cannot be evaluated.
//!
//! | in a condition | meaning |
//! |---|---|
//! | `principal` | the client's node: `.name`, `.party`, `.attributes` |
//! | `principal.party` | its party: `.name`, `.labels` |
//! | `resource` | the data set: `.name`, `.owner` (a party), `.node`, `.labels`, `.consent` |
//! | `action` | `Action::"read"` or `Action::"write"` |
//! | `context.purpose` | the purpose of the data flow |

use super::clause::{Clause, Effect, Labels};
use super::condition;
use cedar_policy::{
    Authorizer, Context, Decision, Entities, EntityUid, Policy, PolicyId, PolicySet, Request, Schema,
    ValidationMode, Validator,
};
use serde_json::{Value, json};
use sidetrack_core::agreement::{Facts, Obligations, Opinion, Permit, Question, Reasoner, Surplus};
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex};

/// The types of entities and actions in conditions.
const SCHEMA: &str = r#"
entity Party { name: String, labels: Set<String> };
entity Node { name: String, party: Party, attributes: Set<String> };
entity DataSet { name: String, owner: Party, node: Node, labels: Set<String>, consent: Bool };
action read, write appliesTo { principal: Node, resource: DataSet, context: { purpose: String } };
"#;

/// The policy that enforces consent. An agreement cannot have this name, because it contains blanks.
const CONSENT: &str = "consent is withdrawn";

/// Most compiled policies in the cache. Then the cache is emptied and policies are compiled again.
const COMPILED_MAX: usize = 1024;

/// The parts that are the same for all agreements. Cedar needs longer to read them than to answer a thousand
/// questions, and withdrawn consent must take effect within milliseconds.
struct Ground {
    schema: Schema,
    validator: Validator,
    consent: Policy,
}

static GROUND: LazyLock<Result<Ground, String>> = LazyLock::new(|| {
    let schema: Schema = SCHEMA.parse().map_err(|error: cedar_policy::CedarSchemaError| error.to_string())?;
    let consent = "forbid (principal, action, resource) unless { resource.consent };";
    let consent = Policy::parse(Some(PolicyId::new(CONSENT)), consent).map_err(|error| error.to_string())?;
    Ok(Ground { validator: Validator::new(schema.clone()), schema, consent })
});

/// Policies that compiled without errors, by name and text. Facts change more often than agreements.
static COMPILED: Mutex<BTreeMap<(Arc<str>, String), Policy>> = Mutex::new(BTreeMap::new());

/// An error in a condition, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WhenError {
    /// The index of its agreement in the list.
    pub agreement: usize,
    /// The message.
    pub message: String,
    /// Byte offsets in the condition, if they are known.
    pub span: Option<Range<usize>>,
}

/// Compiled agreements.
pub(super) struct Cedar {
    authorizer: Authorizer,
    policies: PolicySet,
    entities: Entities,
    /// The obligations of each agreement, and whether it allows surpluses.
    terms: BTreeMap<Arc<str>, (Obligations, Surplus)>,
    clauses: Vec<Clause>,
}

impl fmt::Debug for Cedar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cedar").field("agreements", &self.terms.keys()).finish_non_exhaustive()
    }
}

impl Cedar {
    /// Compiles agreements.
    ///
    /// # Errors
    /// Returns an error for each condition that cannot be compiled.
    pub(super) fn new(facts: &Facts, labels: &Labels, clauses: Vec<Clause>) -> Result<Self, Vec<WhenError>> {
        let internal = |error: &dyn fmt::Display| {
            vec![WhenError { agreement: 0, message: format!("the policy engine: {error}"), span: None }]
        };
        let ground = GROUND.as_ref().map_err(|error| internal(error))?;
        let mut policies = PolicySet::new();
        let mut wrong = Vec::new();
        for (agreement, clause) in clauses.iter().enumerate() {
            match compiled(clause, &ground.validator) {
                Ok(policy) => policies.add(policy).map_err(|error| internal(&error))?,
                Err((message, span)) => wrong.push(WhenError { agreement, message, span }),
            }
        }
        if !wrong.is_empty() {
            return Err(wrong);
        }
        policies.add(ground.consent.clone()).map_err(|error| internal(&error))?;
        let entities = Entities::from_json_value(entities(facts, labels), Some(&ground.schema))
            .map_err(|error| internal(&error))?;
        let terms = |clause: &Clause| (clause.name.clone(), (clause.obligations, clause.surplus));
        let terms = clauses.iter().map(terms).collect();
        Ok(Self { authorizer: Authorizer::new(), policies, entities, terms, clauses })
    }

    fn request(question: &Question<'_>) -> Result<Request, String> {
        let context = Context::from_json_value(json!({ "purpose": question.purpose }), None);
        Request::new(
            uid("Node", &question.client.name)?,
            uid("Action", question.access.as_str())?,
            uid("DataSet", &question.data.name)?,
            context.map_err(|error| error.to_string())?,
            None,
        )
        .map_err(|error| error.to_string())
    }

    fn refusal(&self, question: &Question<'_>, forbidden_by: &[&str]) -> String {
        let Question { client, data, purpose, access, .. } = question;
        let (node, party, data) = (&client.name, &client.party, &data.name);
        if forbidden_by.contains(&CONSENT) {
            return format!("consent for '{data}' is withdrawn");
        }
        if let Some(name) = forbidden_by.first() {
            return format!("agreement '{name}' forbids it");
        }
        let nearest = self.clauses.iter().filter(|clause| clause.effect == Effect::Permit);
        let nearest =
            nearest.filter_map(|clause| Some((clause.obstacle(question)?, clause))).max_by_key(|(o, _)| o.0);
        let nearest =
            nearest.map(|((_, why), clause)| format!("; '{}' {why}", clause.name)).unwrap_or_default();
        format!("no agreement lets node '{node}' of '{party}' {access} '{data}' for {purpose}{nearest}")
    }
}

impl Reasoner for Cedar {
    fn opinion(&self, question: &Question<'_>) -> Opinion {
        let request = match Self::request(question) {
            Ok(request) => request,
            Err(error) => return Opinion::Refuse(format!("the agreement cannot be asked: {error}")),
        };
        let response = self.authorizer.is_authorized(&request, &self.policies, &self.entities);
        if let Some(error) = response.diagnostics().errors().next() {
            // Cedar ignores policies that it cannot evaluate. The ignored one may be the one that forbids.
            return Opinion::Refuse(format!("an agreement cannot be evaluated: {error}"));
        }
        let by: Vec<&str> = response.diagnostics().reason().map(AsRef::as_ref).collect();
        match response.decision() {
            Decision::Allow => {
                let mut permit = Permit::default();
                for (name, (obligations, surplus)) in
                    self.terms.iter().filter(|(name, _)| by.contains(&&***name))
                {
                    permit.by.push(name.clone());
                    permit.obligations = permit.obligations.union(obligations);
                    // One permitting agreement that allows a surplus is enough.
                    permit.surplus = permit.surplus.max(*surplus);
                }
                Opinion::Permit(permit)
            }
            Decision::Deny => Opinion::Refuse(self.refusal(question, &by)),
        }
    }
}

impl Clause {
    /// Returns how closely this agreement matches the question, and what does not match. `None` if it is about
    /// other data.
    fn obstacle(&self, question: &Question<'_>) -> Option<(u8, String)> {
        let fits = |list: &[String], name: &str| list.is_empty() || list.iter().any(|one| one == name);
        if !fits(&self.data, &question.data.name) {
            return None;
        }
        let (parties, nodes) = (self.parties.join(", "), self.nodes.join(", "));
        Some(if !fits(&self.parties, &question.client.party) {
            (0, format!("is with {parties} only"))
        } else if !fits(&self.nodes, &question.client.name) {
            (1, format!("is for the nodes {nodes} only"))
        } else if !fits(&self.purposes, question.purpose) {
            (2, format!("is for {} only", self.purposes.join(", ")))
        } else if !self.access.is_empty() && !self.access.contains(&question.access.as_str()) {
            (3, format!("allows {} only", self.access.join(", ")))
        } else {
            (4, format!("holds only when {}", self.condition()))
        })
    }

    /// The text of `when`.
    fn condition(&self) -> &str {
        self.when.as_deref().unwrap_or("true")
    }

    /// The condition without `when`.
    fn scope(&self) -> String {
        let list = |of: &str, names: &[String]| {
            let names: Vec<_> = names.iter().map(|name| format!("{of}{name:?}")).collect();
            format!("[{}]", names.join(", "))
        };
        let mut all = vec!["true".to_owned()];
        let mut one_of = |of: &str, names: &[String], what: &str| {
            if !names.is_empty() {
                all.push(format!("{}.contains({what})", list(of, names)));
            }
        };
        one_of("Party::", &self.parties, "principal.party");
        one_of("Node::", &self.nodes, "principal");
        one_of("DataSet::", &self.data, "resource");
        one_of("", &self.purposes, "context.purpose");
        all.join(" && ")
    }
}

/// An error message, and its place in the condition.
type Mistake = (String, Option<Range<usize>>);

/// Returns the policy of one agreement, from the cache or newly compiled.
fn compiled(clause: &Clause, validator: &Validator) -> Result<Policy, Mistake> {
    let (text, begins) = policy(clause);
    let key = (clause.name.clone(), text);
    let known = || lock(&COMPILED);
    if let Some(policy) = known().get(&key) {
        return Ok(policy.clone());
    }
    let policy = compile(clause, &key.1, begins, validator)?;
    let mut known = known();
    if known.len() >= COMPILED_MAX {
        known.clear();
    }
    known.insert(key, policy.clone());
    Ok(policy)
}

/// Returns the text of an agreement's policy, and where its condition begins.
fn policy(clause: &Clause) -> (String, usize) {
    let effect = match clause.effect {
        Effect::Permit => "permit",
        Effect::Forbid => "forbid",
    };
    let access: Vec<_> = clause.access.iter().map(|access| format!("Action::\"{access}\"")).collect();
    let action =
        if access.is_empty() { "action".to_owned() } else { format!("action in [{}]", access.join(", ")) };
    let mut text = format!("{effect} (principal, {action}, resource) when {{ {} }}", clause.scope());
    text.push_str(" when { ");
    let begins = text.len();
    text.push_str(clause.condition());
    // On a new line, because a condition may end with a comment.
    text.push_str("\n};");
    (text, begins)
}

fn compile(clause: &Clause, text: &str, begins: usize, validator: &Validator) -> Result<Policy, Mistake> {
    let when = clause.condition();
    if let Some((message, span)) = condition::refused(when) {
        return Err((message, Some(span)));
    }
    let inside = |span: Range<usize>| {
        let span = span.start.checked_sub(begins)?..span.end.checked_sub(begins)?;
        (span.end <= when.len()).then_some(span)
    };
    let place = |error: &dyn miette::Diagnostic| {
        let label = error.labels()?.next()?;
        inside(label.offset()..label.offset() + label.len())
    };
    let id = PolicyId::new(&*clause.name);
    let policy = Policy::parse(Some(id), text).map_err(|errors| {
        let place = errors.iter().next().and_then(|error| place(error));
        (errors.to_string(), place)
    })?;
    let alone = PolicySet::from_policies([policy.clone()]).map_err(|error| (error.to_string(), None))?;
    let result = validator.validate(&alone, ValidationMode::Strict);
    match result.validation_errors().next() {
        Some(error) => Err((words(error), place(error))),
        None => Ok(policy),
    }
}

/// Returns a validation error without the policy name that Cedar puts before it.
fn words(error: &cedar_policy::ValidationError) -> String {
    let text = error.to_string();
    text.split_once(", ")
        .filter(|(head, _)| head.starts_with("for policy"))
        .map_or(text.clone(), |(_, rest)| rest.to_owned())
}

fn uid(kind: &str, name: &str) -> Result<EntityUid, String> {
    EntityUid::from_json(json!({ "type": kind, "id": name })).map_err(|error| error.to_string())
}

fn entities(facts: &Facts, labels: &Labels) -> Value {
    let reference = |kind: &str, id: &str| json!({ "type": kind, "id": id });
    let entity = |kind: &str, id: &str, attrs: Value| json!({ "uid": { "type": kind, "id": id }, "attrs": attrs, "parents": [] });
    let mut all: Vec<Value> = Vec::new();
    for (name, labels) in &labels.parties {
        all.push(entity("Party", name, json!({ "name": name, "labels": labels })));
    }
    for node in facts.nodes() {
        let attributes: Vec<_> =
            facts.catalogue().attribute_names(node.attributes).map(|name| &**name).collect();
        let party = reference("Party", &node.party);
        all.push(entity(
            "Node",
            &node.name,
            json!({ "name": &*node.name, "party": party, "attributes": attributes }),
        ));
    }
    for data in facts.data() {
        let Some(holder) = facts.nodes().get(data.node) else { continue };
        let name = &*data.name;
        let attrs = json!({
            "name": name,
            "owner": reference("Party", &holder.party),
            "node": reference("Node", &holder.name),
            "labels": labels.data.get(name).cloned().unwrap_or_default(),
            "consent": !labels.withdrawn.iter().any(|withdrawn| withdrawn == name),
        });
        all.push(entity("DataSet", name, attrs));
    }
    Value::Array(all)
}
