//! Functions in containers, with a real container engine: flows through every protocol and in chains, what happens when
//! functions misbehave, and that nothing is left behind however we end.

mod commands;
mod engine;
mod faults;
mod function;
mod health;
mod lifecycle;
mod limits;
#[path = "../node/mod.rs"]
mod node;
mod passing;
#[path = "../control/plane.rs"]
mod plane;
mod pool;
mod scene;
mod shipping;
mod steps;
mod upgrade;
