//! Bytes of running flows in each second: what a flow has moved since the sample before.

use crate::live::Ledger;
use parquet::basic::{Compression, Encoding, LogicalType, Repetition, TimeUnit, Type as Physical};
use parquet::column::reader::get_typed_column_reader;
use parquet::data_type::Int64Type;
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;

/// Flows of their own in one sample: those that moved most. The others are counted together, as flow 0.
pub(super) const FLOWS_MAX: usize = 256;

const NAMES: [&str; 4] = ["at", "flow", "bytes_up", "bytes_down"];

/// What a flow moved until a moment, since the sample before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The flow's number; 0: several flows together.
    pub flow: u64,
    /// Payload bytes from client to server.
    pub up: u64,
    /// Payload bytes from server to client.
    pub down: u64,
}

impl Moved {
    fn write(self, out: &mut Vec<u8>) {
        // Writing to a Vec cannot fail.
        let _ = writeln!(out, "[{},{},{},{}]", self.at_ms, self.flow, self.up, self.down);
    }

    /// Reads a line. `None`: it is not a sample.
    pub(super) fn read(line: &[u8]) -> Option<Self> {
        let (at_ms, flow, up, down) = serde_json::from_slice(line).ok()?;
        Some(Self { at_ms, flow, up, down })
    }
}

/// Remembers what flows had moved at the sample before.
#[derive(Default)]
pub(super) struct Sampler {
    before: HashMap<u64, (u64, u64)>,
}

impl Sampler {
    /// Appends a line for each flow that has moved bytes.
    pub(super) fn sample(&mut self, ledgers: &[Arc<Ledger>], at_ms: i64, out: &mut Vec<u8>) {
        let mut now = HashMap::new();
        let mut moved = Vec::new();
        for flow in ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
            let (id, (up, down)) = (flow.id.0, flow.bytes());
            let before = self.before.get(&id).copied().unwrap_or_default();
            now.insert(id, (up, down));
            let (up, down) = (up.saturating_sub(before.0), down.saturating_sub(before.1));
            if up > 0 || down > 0 {
                moved.push(Moved { at_ms, flow: id, up, down });
            }
        }
        self.before = now;
        moved.sort_by_key(|one| std::cmp::Reverse(one.up.saturating_add(one.down)));
        let rest = moved.split_off(moved.len().min(FLOWS_MAX));
        moved.into_iter().for_each(|one| one.write(out));
        if !rest.is_empty() {
            let sum = |of: fn(&Moved) -> u64| rest.iter().map(of).fold(0, u64::saturating_add);
            Moved { at_ms, flow: 0, up: sum(|one| one.up), down: sum(|one| one.down) }.write(out);
        }
    }
}

fn schema() -> Result<Type, ParquetError> {
    let fields: Result<Vec<_>, _> = NAMES
        .iter()
        .map(|name| {
            let moment = LogicalType::timestamp(true, TimeUnit::MILLIS);
            let logical = if *name == "at" { moment } else { LogicalType::integer(64, false) };
            Type::primitive_type_builder(name, Physical::INT64)
                .with_repetition(Repetition::REQUIRED)
                .with_logical_type(Some(logical))
                .build()
                .map(Arc::new)
        })
        .collect();
    Type::group_type_builder("moved").with_fields(fields?).build()
}

/// Writes samples into a file of columns.
pub(super) fn write(samples: &[Moved], file: &mut File) -> Result<(), ParquetError> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::LZ4_RAW)
        .set_dictionary_enabled(false)
        .set_encoding(Encoding::DELTA_BINARY_PACKED)
        .set_offset_index_disabled(true)
        .build();
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema()?), Arc::new(properties))?;
    let mut group = writer.next_row_group()?;
    let columns: [fn(&Moved) -> i64; 4] = [
        |one| one.at_ms,
        |one| one.flow.cast_signed(),
        |one| one.up.cast_signed(),
        |one| one.down.cast_signed(),
    ];
    for of in columns {
        let Some(mut column) = group.next_column()? else { break };
        let values: Vec<_> = samples.iter().map(of).collect();
        column.typed::<Int64Type>().write_batch(&values, None, None)?;
        column.close()?;
    }
    group.close()?;
    writer.close().map(|_| ())
}

/// Reads the samples of a file of columns.
pub(super) fn read(file: File) -> Result<Vec<Moved>, ParquetError> {
    let reader = SerializedFileReader::new(file)?;
    let schema = reader.metadata().file_metadata().schema_descr();
    if schema.columns().iter().map(|column| column.name()).ne(NAMES) {
        return Err(ParquetError::General("no file of counters".to_owned()));
    }
    let mut samples = Vec::new();
    for number in 0..reader.num_row_groups() {
        let group = reader.get_row_group(number)?;
        let rows = usize::try_from(group.metadata().num_rows()).unwrap_or(0);
        let mut columns = Vec::new();
        for place in 0..NAMES.len() {
            let mut column = get_typed_column_reader::<Int64Type>(group.get_column_reader(place)?);
            let mut values = Vec::with_capacity(rows);
            while values.len() < rows {
                let (read, ..) = column.read_records(rows - values.len(), None, None, &mut values)?;
                if read == 0 {
                    return Err(ParquetError::EOF("a column has fewer rows than the file".to_owned()));
                }
            }
            columns.push(values);
        }
        let [at, flow, up, down] = [0, 1, 2, 3].map(|place: usize| &columns[place]);
        samples.extend((0..rows).map(|row| Moved {
            at_ms: at[row],
            flow: flow[row].cast_unsigned(),
            up: up[row].cast_unsigned(),
            down: down[row].cast_unsigned(),
        }));
    }
    Ok(samples)
}
