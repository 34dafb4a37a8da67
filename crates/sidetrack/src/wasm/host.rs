//! What a module may call: the functions of proxy-wasm ABI 0.2.1 for connections.

use sidetrack_core::flow::{Flow, Side};
use sidetrack_core::function::STAGE_OUT_MAX;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use wasmi::{
    Caller, Engine, Error, Extern, ExternType, Linker, Module, StoreLimits, StoreLimitsBuilder, Val,
};

/// The answers of the interface.
const OK: i32 = 0;
const NOT_FOUND: i32 = 1;
const BAD_ARGUMENT: i32 = 2;
const INVALID_MEMORY_ACCESS: i32 = 6;
const UNIMPLEMENTED: i32 = 12;
/// "Function not implemented" in the interface of WASI.
const WASI_NOT_IMPLEMENTED: i32 = 52;
/// The numbers of buffers: data of the client, data of the server, the configuration.
const CLIENT_DATA: i32 = 2;
const SERVER_DATA: i32 = 3;
const CONFIGURATION: i32 = 7;
/// Most bytes of one message in the log, and of the path of a property.
const TEXT_MAX: usize = 1024;
/// Most entries of a table: functions that a module calls indirectly.
const TABLE_MAX: usize = 65_536;

/// What a module can ask about a flow.
pub(super) struct Facts {
    name: Arc<str>,
    properties: Vec<(&'static str, Vec<u8>)>,
}

impl Facts {
    pub(super) fn new(name: &Arc<str>, flow: &Flow) -> Self {
        let port = |port: u16| i64::from(port).to_le_bytes().to_vec();
        let mut properties = vec![
            ("plugin_name", name.as_bytes().to_vec()),
            ("source\0address", flow.client.to_string().into_bytes()),
            ("source\0port", port(flow.client.port())),
            ("destination\0address", flow.orig_dst.to_string().into_bytes()),
            ("destination\0port", port(flow.orig_dst.port)),
        ];
        let host = flow.host.as_ref().map(|host| host.as_str().as_bytes().to_vec());
        properties.extend(host.map(|host| ("connection\0requested_server_name", host)));
        Self { name: name.clone(), properties }
    }
}

/// The state behind one instance.
pub(super) struct Host {
    facts: Facts,
    configuration: Box<str>,
    /// By side: the bytes that the module sees.
    shown: [Vec<u8>; 2],
    changed: [bool; 2],
    may_pass: [bool; 2],
    is_closed: bool,
    limits: StoreLimits,
}

impl Host {
    pub(super) fn new(facts: Facts, configuration: &str, memory_bytes: usize) -> Self {
        let limits = StoreLimitsBuilder::new().memory_size(memory_bytes).table_elements(TABLE_MAX);
        let limits = limits.instances(1).memories(1).tables(4).build();
        let configuration = configuration.into();
        let shown = [Vec::new(), Vec::new()];
        Self {
            facts,
            configuration,
            shown,
            changed: [false; 2],
            may_pass: [false; 2],
            is_closed: false,
            limits,
        }
    }

    pub(super) const fn limits(&mut self) -> &mut StoreLimits {
        &mut self.limits
    }

    pub(super) const fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) const fn may_pass(&self, from: Side) -> bool {
        self.may_pass[from as usize]
    }

    /// Sets the bytes that the next call sees.
    pub(super) fn show(&mut self, from: Side, bytes: Vec<u8>) {
        self.shown[from as usize] = bytes;
        (self.changed[from as usize], self.may_pass[from as usize]) = (false, false);
    }

    /// Returns the bytes after the call, and whether the module has changed them.
    pub(super) fn take(&mut self, from: Side) -> (Vec<u8>, bool) {
        (std::mem::take(&mut self.shown[from as usize]), self.changed[from as usize])
    }

    fn buffer(&self, number: i32) -> Option<&[u8]> {
        match number {
            CLIENT_DATA => Some(&self.shown[Side::Client as usize]),
            SERVER_DATA => Some(&self.shown[Side::Server as usize]),
            CONFIGURATION => Some(self.configuration.as_bytes()),
            _ => None,
        }
    }
}

fn side(number: i32) -> Option<Side> {
    match number {
        CLIENT_DATA => Some(Side::Client),
        SERVER_DATA => Some(Side::Server),
        _ => None,
    }
}

/// A number or pointer of the module. All of them are unsigned.
const fn unsigned(number: i32) -> usize {
    number.cast_unsigned() as usize
}

fn memory(caller: &Caller<'_, Host>) -> Option<wasmi::Memory> {
    caller.get_export("memory").and_then(Extern::into_memory)
}

/// Returns bytes of the module.
fn read(caller: &Caller<'_, Host>, at: i32, size: i32) -> Option<Vec<u8>> {
    let memory = memory(caller)?;
    let end = unsigned(at).checked_add(unsigned(size))?;
    memory.data(caller).get(unsigned(at)..end).map(<[u8]>::to_vec)
}

fn write(caller: &mut Caller<'_, Host>, at: i32, bytes: &[u8]) -> i32 {
    let Some(memory) = memory(caller) else { return INVALID_MEMORY_ACCESS };
    memory.write(caller, unsigned(at), bytes).map_or(INVALID_MEMORY_ACCESS, |()| OK)
}

/// Copies bytes into memory that the module allocates, and says where.
fn give(caller: &mut Caller<'_, Host>, bytes: &[u8], at: i32, size: i32) -> Result<i32, Error> {
    let names = ["proxy_on_memory_allocate", "malloc"];
    let allocate = names.iter().find_map(|name| caller.get_export(name).and_then(Extern::into_func));
    let Some(allocate) = allocate else {
        return Err(Error::new("it exports no `proxy_on_memory_allocate` and no `malloc`"));
    };
    let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
    let mut place = 0;
    if length > 0 {
        place = allocate.typed::<i32, i32>(&*caller)?.call(&mut *caller, length)?;
        let written = write(caller, place, bytes);
        if written != OK {
            return Ok(written);
        }
    }
    let told = [(at, place), (size, length)].map(|(at, value)| write(caller, at, &value.to_le_bytes()));
    Ok(told.into_iter().find(|answer| *answer != OK).unwrap_or(OK))
}

fn log(caller: Caller<'_, Host>, level: i32, at: i32, size: i32) -> i32 {
    let shorter = unsigned(size).min(TEXT_MAX) as i32;
    let Some(text) = read(&caller, at, shorter) else { return INVALID_MEMORY_ACCESS };
    let (text, function) = (String::from_utf8_lossy(&text), &*caller.data().facts.name);
    match level {
        0 | 1 => tracing::debug!(%function, "{text}"),
        2 => tracing::info!(%function, "{text}"),
        3 => tracing::warn!(%function, "{text}"),
        4 | 5 => tracing::error!(%function, "{text}"),
        _ => return BAD_ARGUMENT,
    }
    OK
}

fn get_bytes(
    mut caller: Caller<'_, Host>,
    buffer: i32,
    start: i32,
    most: i32,
    at: i32,
    size: i32,
) -> Result<i32, Error> {
    let Some(bytes) = caller.data().buffer(buffer) else { return Ok(NOT_FOUND) };
    let start = unsigned(start).min(bytes.len());
    let end = start.saturating_add(unsigned(most)).min(bytes.len());
    let bytes = bytes[start..end].to_vec();
    give(&mut caller, &bytes, at, size)
}

fn set_bytes(mut caller: Caller<'_, Host>, buffer: i32, start: i32, size: i32, at: i32, length: i32) -> i32 {
    let Some(from) = side(buffer) else { return BAD_ARGUMENT };
    if unsigned(length) > STAGE_OUT_MAX {
        return BAD_ARGUMENT;
    }
    let Some(new) = read(&caller, at, length) else { return INVALID_MEMORY_ACCESS };
    let host = caller.data_mut();
    let shown = &mut host.shown[from as usize];
    let start = unsigned(start).min(shown.len());
    let end = start.saturating_add(unsigned(size)).min(shown.len());
    if shown.len() - (end - start) + new.len() > STAGE_OUT_MAX {
        return BAD_ARGUMENT;
    }
    shown.splice(start..end, new);
    host.changed[from as usize] = true;
    OK
}

fn buffer_status(mut caller: Caller<'_, Host>, buffer: i32, size: i32, flags: i32) -> i32 {
    let Some(length) = caller.data().buffer(buffer).map(<[u8]>::len) else { return NOT_FOUND };
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    match write(&mut caller, size, &length.to_le_bytes()) {
        OK => write(&mut caller, flags, &[0; 4]),
        answer => answer,
    }
}

fn property(mut caller: Caller<'_, Host>, path: i32, length: i32, at: i32, size: i32) -> Result<i32, Error> {
    if unsigned(length) > TEXT_MAX {
        return Ok(BAD_ARGUMENT);
    }
    let Some(path) = read(&caller, path, length) else { return Ok(INVALID_MEMORY_ACCESS) };
    let path = path.strip_suffix(b"\0").unwrap_or(&path);
    let known = caller.data().facts.properties.iter().find(|(name, _)| name.as_bytes() == path);
    let Some(value) = known.map(|(_, value)| value.clone()) else { return Ok(NOT_FOUND) };
    give(&mut caller, &value, at, size)
}

fn pass_on(mut caller: Caller<'_, Host>, stream: i32) -> i32 {
    let Some(from) = side(stream) else { return BAD_ARGUMENT };
    caller.data_mut().may_pass[from as usize] = true;
    OK
}

fn close(mut caller: Caller<'_, Host>, stream: i32) -> i32 {
    if side(stream).is_none() {
        return BAD_ARGUMENT;
    }
    caller.data_mut().is_closed = true;
    OK
}

fn time(mut caller: Caller<'_, Host>, at: i32) -> i32 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    write(&mut caller, at, &u64::try_from(now).unwrap_or(u64::MAX).to_le_bytes())
}

/// Makes everything that a module imports. A call that is not about connections answers "unimplemented".
pub(super) fn linker(engine: &Engine, module: &Module) -> Result<Linker<Host>, Error> {
    let mut linker = Linker::new(engine);
    linker.func_wrap("env", "proxy_log", log)?;
    linker.func_wrap("env", "proxy_get_buffer_bytes", get_bytes)?;
    linker.func_wrap("env", "proxy_set_buffer_bytes", set_bytes)?;
    linker.func_wrap("env", "proxy_get_buffer_status", buffer_status)?;
    linker.func_wrap("env", "proxy_get_property", property)?;
    linker.func_wrap("env", "proxy_continue_stream", pass_on)?;
    linker.func_wrap("env", "proxy_close_stream", close)?;
    linker.func_wrap("env", "proxy_get_current_time_nanoseconds", time)?;
    for name in ["proxy_set_effective_context", "proxy_set_tick_period_milliseconds"] {
        linker.func_wrap("env", name, |_: Caller<'_, Host>, _: i32| OK)?;
    }
    linker.func_wrap("env", "proxy_done", |_: Caller<'_, Host>| OK)?;
    linker.func_wrap("env", "proxy_get_log_level", |mut caller: Caller<'_, Host>, at: i32| {
        write(&mut caller, at, &2_i32.to_le_bytes())
    })?;
    for import in module.imports() {
        let ExternType::Func(ty) = import.ty() else { continue };
        let answer = if import.module() == "env" { UNIMPLEMENTED } else { WASI_NOT_IMPLEMENTED };
        let stub = move |_: Caller<'_, Host>, _: &[Val], results: &mut [Val]| {
            results.iter_mut().for_each(|result| {
                if let Val::I32(result) = result {
                    *result = answer;
                }
            });
            Ok(())
        };
        // What is defined above stays: a second definition is refused.
        let _ = linker.func_new(import.module(), import.name(), ty.clone(), stub);
    }
    Ok(linker)
}
