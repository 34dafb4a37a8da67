//! Functions in WebAssembly: the part of proxy-wasm ABI 0.2.1 that is about connections, run by an interpreter.
//!
//! ```text
//!   Program::new            Program::stage                     handle, finish
//!   compiled once -------> one instance for each flow: ------> on_downstream_data, on_upstream_data -- Continue --> passes
//!                          context 1 (root), 2 (the flow),            |          ^                 \-- Pause ----> held
//!                          on_new_connection                          | a trap   | more bytes: asked again with all
//!                                |                                    v
//!                                | a trap, or no fuel left -----> the flow ends: function_failed, with the reason
//! ```
//!
//! Each call gets `fuel` instructions, and an instance has at most `memory_bytes`. A module sees no file, socket or
//! other flow. Calls of the interface that are not about connections answer "unimplemented".

mod host;

use host::{Facts, Host};
use sidetrack_core::chain::OFFER_MAX;
use sidetrack_core::flow::{Flow, Side};
use sidetrack_core::function::{Interest, Stage, Step, Stop, WasmSpec};
use sidetrack_core::time::Instant;
use std::sync::Arc;
use std::time::Duration;
use wasmi::{Config, Engine, Instance, Linker, Module, Store, TypedFunc, WasmParams, WasmResults};

/// The number of the context of the whole program, and that of the flow.
const ROOT: i32 = 1;
const FLOW: i32 = 2;
/// How long bytes are held at most. The packet engine does not wait: there it makes held bytes pass.
const HOLD: Duration = Duration::from_secs(1800);
/// The result of a call that lets the bytes pass.
const CONTINUE: i32 = 0;
/// The other side has closed the connection.
const REMOTE: i32 = 2;

/// A compiled module, for all flows of a function.
pub struct Program {
    spec: WasmSpec,
    module: Module,
    linker: Linker<Host>,
}

impl Program {
    /// Compiles a module: binary, or text (WAT).
    ///
    /// # Errors
    /// Fails if the module is not valid, or has no function for the data of either side.
    pub fn new(spec: &WasmSpec) -> Result<Self, String> {
        let mut config = Config::default();
        config.consume_fuel(true);
        let engine = Engine::new(&config);
        let module = Module::new(&engine, &*spec.module).map_err(|error| error.to_string())?;
        let names: Vec<_> = module.exports().map(|export| export.name().to_owned()).collect();
        let has = |name: &str| names.iter().any(|one| one == name);
        if !has(data_of(Side::Client)) && !has(data_of(Side::Server)) {
            let (client, server) = (data_of(Side::Client), data_of(Side::Server));
            return Err(format!("it exports neither `{client}` nor `{server}`"));
        }
        let linker = host::linker(&engine, &module).map_err(|error| error.to_string())?;
        Ok(Self { spec: spec.clone(), module, linker })
    }

    /// Makes the stage for one flow.
    ///
    /// # Errors
    /// Fails if the module cannot start, or refuses the connection.
    pub fn stage(&self, name: &Arc<str>, flow: &Flow) -> Result<Box<dyn Stage>, Stop> {
        let memory = usize::try_from(self.spec.memory_bytes).unwrap_or(usize::MAX);
        let host = Host::new(Facts::new(name, flow), &self.spec.configuration, memory);
        let mut store = Store::new(self.module.engine(), host);
        store.limiter(|host| host.limits());
        store.set_fuel(self.spec.fuel).map_err(|error| failed(&error))?;
        let instance =
            self.linker.instantiate_and_start(&mut store, &self.module).map_err(|error| failed(&error))?;
        let mut machine = Machine { store, instance, fuel: self.spec.fuel };
        machine.begin(&self.spec)?;
        let data =
            [Side::Client, Side::Server].map(|side| machine.typed::<(i32, i32, i32), i32>(data_of(side)));
        let wasm = Wasm { machine, data, held: [Vec::new(), Vec::new()], until: [None; 2] };
        wasm.refusal()?;
        Ok(Box::new(wasm))
    }
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").field("file", &self.spec.file).finish_non_exhaustive()
    }
}

const fn data_of(side: Side) -> &'static str {
    match side {
        Side::Client => "proxy_on_downstream_data",
        Side::Server => "proxy_on_upstream_data",
    }
}

fn failed(error: &wasmi::Error) -> Stop {
    Stop::failed(format!("the module stopped: {error}"))
}

/// One instance.
struct Machine {
    store: Store<Host>,
    instance: Instance,
    fuel: u64,
}

impl Machine {
    fn typed<P: WasmParams, R: WasmResults>(&self, name: &str) -> Option<TypedFunc<P, R>> {
        self.instance.get_typed_func(&self.store, name).ok()
    }

    /// Calls a function of the module with new fuel.
    fn run<P: WasmParams, R: WasmResults>(&mut self, function: &TypedFunc<P, R>, args: P) -> Result<R, Stop> {
        self.store.set_fuel(self.fuel).map_err(|error| failed(&error))?;
        function.call(&mut self.store, args).map_err(|error| failed(&error))
    }

    /// Calls an exported function, if the module has it.
    fn call<P: WasmParams, R: WasmResults>(&mut self, name: &str, args: P) -> Result<Option<R>, Stop> {
        self.typed(name).map(|function| self.run(&function, args)).transpose()
    }

    /// Starts the module and tells it about the flow, in the order of the specification.
    fn begin(&mut self, spec: &WasmSpec) -> Result<(), Stop> {
        for start in ["_initialize", "_start"] {
            self.call::<(), ()>(start, ())?;
        }
        let size = i32::try_from(spec.configuration.len()).unwrap_or(0);
        self.call::<(i32, i32), ()>("proxy_on_context_create", (ROOT, 0))?;
        for (name, size) in [("proxy_on_vm_start", 0), ("proxy_on_configure", size)] {
            if self.call::<(i32, i32), i32>(name, (ROOT, size))? == Some(0) {
                return Err(Stop::failed(format!("the module does not accept its configuration (`{name}`)")));
            }
        }
        self.call::<(i32, i32), ()>("proxy_on_context_create", (FLOW, ROOT))?;
        self.call::<i32, i32>("proxy_on_new_connection", FLOW)?;
        Ok(())
    }
}

/// A function for data: the flow, the number of bytes, and whether they are the last.
type Data = TypedFunc<(i32, i32, i32), i32>;

/// The module's part for one flow.
struct Wasm {
    machine: Machine,
    /// By side: the function for its data.
    data: [Option<Data>; 2],
    /// By side: bytes that the module has asked to hold.
    held: [Vec<u8>; 2],
    /// By side: until when they are held.
    until: [Option<Instant>; 2],
}

impl Wasm {
    /// Fails if the module has closed the connection.
    fn refusal(&self) -> Result<(), Stop> {
        if self.machine.store.data().is_closed() {
            return Err(Stop::refused("the module closed the connection"));
        }
        Ok(())
    }

    /// Shows the module these bytes. Returns whether they pass, and what they have become if they have changed.
    fn ask(&mut self, from: Side, bytes: Vec<u8>, is_last: bool) -> Result<(bool, Vec<u8>, bool), Stop> {
        let Some(function) = self.data[from as usize] else { return Ok((true, bytes, false)) };
        let size = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
        self.machine.store.data_mut().show(from, bytes);
        let action = self.machine.run(&function, (FLOW, size, i32::from(is_last)))?;
        self.refusal()?;
        let (bytes, changed) = self.machine.store.data_mut().take(from);
        Ok((action == CONTINUE, bytes, changed))
    }

    fn offered(&mut self, now: Instant, from: Side, bytes: &[u8], out: &mut Vec<u8>) -> Result<Step, Stop> {
        let before = self.held[from as usize].len();
        let room = OFFER_MAX.saturating_sub(before);
        if room == 0 {
            return Err(Stop::failed(format!("the module holds back {before} bytes and wants more")));
        }
        let taken = bytes.len().min(room);
        let mut all = std::mem::take(&mut self.held[from as usize]);
        all.extend_from_slice(&bytes[..taken]);
        let (passes, all, changed) = self.ask(from, all, false)?;
        if !passes {
            self.held[from as usize] = all;
            self.until[from as usize].get_or_insert(now + HOLD);
            return Ok(Step::Taken(taken));
        }
        self.until[from as usize] = None;
        if !changed && before == 0 {
            return Ok(Step::Pass(taken));
        }
        out.extend_from_slice(&all);
        Ok(Step::Taken(taken))
    }

    fn release(&mut self, from: Side, out: &mut Vec<u8>) {
        self.until[from as usize] = None;
        out.append(&mut self.held[from as usize]);
    }
}

impl Stage for Wasm {
    fn interest(&self, from: Side) -> Interest {
        if self.data[from as usize].is_some() { Interest::Bytes } else { Interest::Nothing }
    }

    fn handle(&mut self, now: Instant, from: Side, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        self.offered(now, from, bytes, out).unwrap_or_else(Step::Stop)
    }

    fn finish(&mut self, _now: Instant, from: Side, out: &mut Vec<u8>) -> Result<bool, Stop> {
        let held = std::mem::take(&mut self.held[from as usize]);
        self.until[from as usize] = None;
        // At the end nothing more can come that the module could wait for.
        let (_, last, _) = self.ask(from, held, true)?;
        out.extend_from_slice(&last);
        let closed = match from {
            Side::Client => "proxy_on_downstream_connection_close",
            Side::Server => "proxy_on_upstream_connection_close",
        };
        self.machine.call::<(i32, i32), ()>(closed, (FLOW, REMOTE))?;
        Ok(true)
    }

    fn tick(&mut self, _now: Instant, from: Side, out: &mut Vec<u8>) {
        self.release(from, out);
    }

    fn deadline(&self, from: Side) -> Option<Instant> {
        let until = self.until[from as usize]?;
        // The module has said, while it saw the other side, that these bytes may pass.
        Some(if self.machine.store.data().may_pass(from) { Instant::ZERO } else { until })
    }
}

impl Drop for Wasm {
    fn drop(&mut self) {
        // The flow has ended: a trap changes nothing any more.
        let _ = self.machine.call::<i32, i32>("proxy_on_done", FLOW);
        let _ = self.machine.call::<i32, ()>("proxy_on_log", FLOW);
        let _ = self.machine.call::<i32, ()>("proxy_on_delete", FLOW);
    }
}
