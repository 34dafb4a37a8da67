//! `[function.NAME]` of kind "wasm": the file of its module.

use super::super::{At, raw};
use super::Check;
use sidetrack_core::function::WasmSpec;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

/// Largest file of a module, bytes.
const MODULE_MAX: u64 = 16 << 20;
/// Allowed values of `memory_bytes`: from one page of WebAssembly on.
const MEMORY_BYTES: RangeInclusive<u64> = 65_536..=1 << 30;
/// Allowed values of `fuel`.
const FUEL: RangeInclusive<u64> = 1000..=1_000_000_000;

impl Check<'_> {
    pub(super) fn wasm(&mut self, function: &At<raw::Function>) -> Option<WasmSpec> {
        let memory = self.number(function.memory_bytes.as_ref(), MEMORY_BYTES, " bytes");
        let fuel = self.number(function.fuel.as_ref(), FUEL, " instructions");
        let Some(file) = &function.module else {
            let help = "write `module = \"FILE.wasm\"`, or the name of a text file (WAT)";
            self.error(function.span(), "a function in WebAssembly needs its `module`", help);
            return None;
        };
        let module = match read(&self.surroundings.resolve(file)) {
            Ok(module) => module,
            Err(error) => {
                let help = "a relative path starts from the folder of this file";
                self.error(file.span(), format!("cannot read '{}': {error}", file.as_str()), help);
                return None;
            }
        };
        let spec = WasmSpec {
            file: file.as_str().into(),
            module,
            configuration: function.configuration.as_ref().map_or("", |text| text.as_str()).into(),
            memory_bytes: memory.unwrap_or(WasmSpec::MEMORY_BYTES),
            fuel: fuel.unwrap_or(WasmSpec::FUEL),
        };
        if let Err(why) = compiles(&spec) {
            let message = format!("'{}' is not a module that flows can pass: {why}", file.as_str());
            self.error(file.span(), message, "docs/functions.md lists what a module exports and calls");
            return None;
        }
        Some(spec)
    }
}

#[cfg(feature = "wasm")]
fn compiles(spec: &WasmSpec) -> Result<(), String> {
    crate::wasm::Program::new(spec).map(drop)
}

#[cfg(not(feature = "wasm"))]
fn compiles(_: &WasmSpec) -> Result<(), String> {
    Err("this sidetrack is built without WebAssembly (the feature `wasm`)".to_owned())
}

fn read(path: &Path) -> std::io::Result<Arc<[u8]>> {
    let mut module = Vec::new();
    std::fs::File::open(path)?.take(MODULE_MAX + 1).read_to_end(&mut module)?;
    if module.len() as u64 > MODULE_MAX {
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, "it has more than 16 MiB"));
    }
    Ok(module.into())
}
