//! Reads the object files that clang makes: the parts of ELF that BPF programs need. The files are our own,
//! embedded at build time; still nothing here panics on their bytes.
//!
//! Layout: System V ABI, "Object Files"; relocations of BPF: the kernel's Documentation/bpf/llvm_reloc.rst.

use std::collections::BTreeMap;

const SECTION_HEADER: usize = 64;
const SYMBOL: usize = 24;
const RELOCATION: usize = 16;
const SYMBOLS: u32 = 2;
const RELOCATIONS: u32 = 9;
/// `R_BPF_64_64`: a relocation of a 64-bit constant in two halves.
const CONSTANT: u32 = 1;
/// `BPF_LD | BPF_IMM | BPF_DW`, the instruction that such a constant belongs to.
const LOAD_CONSTANT: u8 = 0x18;
/// `BPF_PSEUDO_MAP_FD` in the source register: the constant is the descriptor of a map.
const MAP_DESCRIPTOR: u8 = 1;
/// Bytes of an instruction.
pub(super) const INSTRUCTION: usize = 8;

/// Why an object cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// The file is truncated, or not a 64-bit ELF object in this machine's byte order.
    #[error("the BPF object is broken: {0}")]
    Broken(&'static str),
    /// The section does not exist.
    #[error("the BPF object has no program '{0}'")]
    NoProgram(String),
    /// The program refers to a map that was not passed.
    #[error("the BPF program '{0}' asks for '{1}', which nobody made")]
    NoMap(String, String),
}

/// An object file.
#[derive(Clone, Debug)]
pub struct Object<'a> {
    sections: Vec<Section<'a>>,
    /// Names of symbols by number.
    symbols: Vec<&'a str>,
}

#[derive(Clone, Copy, Debug)]
struct Section<'a> {
    name: &'a str,
    kind: u32,
    info: u32,
    bytes: &'a [u8],
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], ObjectError> {
    let end = at.checked_add(N).ok_or(ObjectError::Broken("an offset is too large"))?;
    let bytes = bytes.get(at..end).ok_or(ObjectError::Broken("it is cut off"))?;
    bytes.try_into().map_err(|_| ObjectError::Broken("it is cut off"))
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16, ObjectError> {
    number(bytes, at).map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, ObjectError> {
    number(bytes, at).map(u32::from_ne_bytes)
}

fn offset_at(bytes: &[u8], at: usize) -> Result<usize, ObjectError> {
    let value = number(bytes, at).map(u64::from_ne_bytes)?;
    usize::try_from(value).map_err(|_| ObjectError::Broken("an offset is too large"))
}

fn slice(bytes: &[u8], at: usize, length: usize) -> Result<&[u8], ObjectError> {
    let end = at.checked_add(length).ok_or(ObjectError::Broken("a length is too large"))?;
    bytes.get(at..end).ok_or(ObjectError::Broken("it is cut off"))
}

fn text(strings: &[u8], at: usize) -> Result<&str, ObjectError> {
    let rest = strings.get(at..).ok_or(ObjectError::Broken("a name is outside"))?;
    let end = rest.iter().position(|byte| *byte == 0).ok_or(ObjectError::Broken("a name has no end"))?;
    std::str::from_utf8(&rest[..end]).map_err(|_| ObjectError::Broken("a name is no text"))
}

impl<'a> Object<'a> {
    /// Reads the tables of an object.
    ///
    /// # Errors
    /// [`ObjectError::Broken`].
    pub fn parse(file: &'a [u8]) -> Result<Self, ObjectError> {
        /// `ELFCLASS64`, and the byte order of this machine.
        const IDENTITY: [u8; 2] = [2, if cfg!(target_endian = "little") { 1 } else { 2 }];
        if slice(file, 0, 6)? != [b"\x7fELF".as_slice(), &IDENTITY].concat() {
            return Err(ObjectError::Broken("it is no 64-bit ELF object of this byte order"));
        }
        let table = offset_at(file, 40)?;
        let (count, names) = (u16_at(file, 60)?, u16_at(file, 62)?);
        let header = |index: usize| slice(file, table + index * SECTION_HEADER, SECTION_HEADER);
        let body = |header: &[u8]| slice(file, offset_at(header, 24)?, offset_at(header, 32)?);
        let strings = body(header(names.into())?)?;
        let mut sections = Vec::new();
        for index in 0..usize::from(count) {
            let header = header(index)?;
            let kind = u32_at(header, 4)?;
            let name = text(strings, u32_at(header, 0)? as usize)?;
            sections.push(Section { name, kind, info: u32_at(header, 44)?, bytes: body(header)? });
        }
        let symbols = match sections.iter().position(|section| section.kind == SYMBOLS) {
            None => Vec::new(),
            Some(index) => {
                // Clang keeps all names in one string table.
                let names = sections.get(u32_at(header(index)?, 40)? as usize);
                let names = names.ok_or(ObjectError::Broken("symbols have no names"))?.bytes;
                let entries = sections[index].bytes.chunks_exact(SYMBOL);
                entries.map(|symbol| text(names, u32_at(symbol, 0)? as usize)).collect::<Result<_, _>>()?
            }
        };
        Ok(Self { sections, symbols })
    }

    /// Returns the bytes of a section.
    pub fn section(&self, name: &str) -> Option<&'a [u8]> {
        self.sections.iter().find(|section| section.name == name).map(|section| section.bytes)
    }

    /// Returns the instructions of the program in a section, with the descriptors of `maps` filled in.
    ///
    /// # Errors
    /// If there is no such program, it asks for a map that is not in `maps`, or the object is broken.
    pub fn program(&self, name: &str, maps: &BTreeMap<&str, i32>) -> Result<Vec<u8>, ObjectError> {
        let found = self.sections.iter().position(|section| section.name == name);
        let index = found.ok_or_else(|| ObjectError::NoProgram(name.to_owned()))?;
        let mut code = self.sections[index].bytes.to_vec();
        let relocations = self
            .sections
            .iter()
            .filter(|section| section.kind == RELOCATIONS && section.info as usize == index)
            .flat_map(|section| section.bytes.chunks_exact(RELOCATION));
        for relocation in relocations {
            let symbol = self.symbols.get(u32_at(relocation, 12)? as usize).copied().unwrap_or_default();
            let map = maps.get(symbol);
            let map = map.ok_or_else(|| ObjectError::NoMap(name.to_owned(), symbol.to_owned()))?;
            let at = offset_at(relocation, 0)?;
            let instruction = code.get_mut(at..at.saturating_add(INSTRUCTION));
            match instruction {
                Some(bytes) if u32_at(relocation, 8)? == CONSTANT && bytes[0] == LOAD_CONSTANT => {
                    // Destination and source share a byte; which half is which follows the byte order.
                    let source =
                        if cfg!(target_endian = "little") { MAP_DESCRIPTOR << 4 } else { MAP_DESCRIPTOR };
                    bytes[1] |= source;
                    bytes[4..8].copy_from_slice(&map.to_ne_bytes());
                }
                _ => return Err(ObjectError::Broken("a relocation is not of a map")),
            }
        }
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::super::SHUNT;
    use super::*;

    fn maps() -> BTreeMap<&'static str, i32> {
        BTreeMap::from([("flows4", 11), ("flows6", 12), ("settings", 13), ("devices", 14)])
    }

    #[test]
    fn our_programs_are_found_and_get_their_maps() {
        let object = Object::parse(SHUNT).unwrap();
        for name in ["tc/bridge", "tc/route", "xdp/bridge", "xdp/route"] {
            let raw = object.section(name).unwrap();
            let code = object.program(name, &maps()).unwrap();
            assert_eq!(code.len(), raw.len());
            let placed: Vec<i32> = code
                .chunks_exact(INSTRUCTION)
                .filter(|i| i[0] == LOAD_CONSTANT && i[1] >> 4 == MAP_DESCRIPTOR)
                .map(|i| i32::from_ne_bytes(i[4..8].try_into().unwrap()))
                .collect();
            assert_eq!(placed.contains(&14), name.starts_with("xdp"), "{name}: {placed:?}");
            assert!([11, 12, 13].iter().all(|fd| placed.contains(fd)), "{name}: {placed:?}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let object = Object::parse(SHUNT).unwrap();
        assert_eq!(object.program("tc/none", &maps()), Err(ObjectError::NoProgram("tc/none".into())));
        let mut few = maps();
        few.remove("settings");
        let error = object.program("tc/bridge", &few).unwrap_err();
        assert_eq!(error, ObjectError::NoMap("tc/bridge".into(), "settings".into()));
    }

    #[test]
    fn every_cut_is_refused_or_read_without_panic() {
        for end in 0..SHUNT.len() {
            if let Ok(object) = Object::parse(&SHUNT[..end]) {
                let _ = object.program("tc/bridge", &maps());
            }
        }
        assert!(Object::parse(b"\x7fELF").is_err());
    }
}
