//! Files of ended flows in columns: Apache Parquet, one row group, texts by dictionary, with a Bloom filter for each
//! indexed column. Other programs can read them.

use super::columns::{Cell, Column, Kind, Row, cell};
use crate::record::FlowRecord;
use parquet::basic::{
    Compression, ConvertedType, Encoding, LogicalType, Repetition, TimeUnit, Type as Physical,
};
use parquet::bloom_filter::Sbbf;
use parquet::column::reader::get_typed_column_reader;
use parquet::data_type::{AsBytes, ByteArray, ByteArrayType, DataType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::statistics::Statistics;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{ColumnPath, Type};
use sidetrack_core::filter::Required;
use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Share of words that a Bloom filter wrongly accepts.
const FALSE_POSITIVES: f64 = 0.01;

/// The schema of a file. Every column may be empty in a row.
fn schema() -> Result<Type, ParquetError> {
    let fields: Result<Vec<_>, _> = Column::ALL
        .iter()
        .map(|(_, name, kind)| {
            let (physical, logical) = match kind {
                Kind::Text => (Physical::BYTE_ARRAY, LogicalType::String),
                Kind::Number => (Physical::INT64, LogicalType::integer(64, false)),
                Kind::Moment => (Physical::INT64, LogicalType::timestamp(true, TimeUnit::MILLIS)),
            };
            Type::primitive_type_builder(name, physical)
                .with_repetition(Repetition::OPTIONAL)
                .with_converted_type(ConvertedType::NONE)
                .with_logical_type(Some(logical))
                .build()
                .map(Arc::new)
        })
        .collect();
    Type::group_type_builder("flow").with_fields(fields?).build()
}

/// The texts of a column, each stored once.
#[derive(Default)]
struct Interned {
    known: HashMap<Box<str>, ByteArray>,
}

impl Interned {
    fn of(&mut self, text: &str) -> ByteArray {
        if let Some(known) = self.known.get(text) {
            return known.clone();
        }
        let bytes = ByteArray::from(text.as_bytes().to_vec());
        self.known.insert(text.into(), bytes.clone());
        bytes
    }
}

/// Values of one column in rising order of rows, and for each row whether it has one.
enum Values {
    Text(Interned, Vec<ByteArray>),
    Number(Vec<i64>),
}

/// Flows on their way into a file.
pub(super) struct Draft {
    columns: Vec<(Values, Vec<i16>)>,
    /// The first capture and the last end, milliseconds since 1970.
    span: Option<(i64, i64)>,
}

impl Draft {
    /// Nothing yet.
    pub(super) fn new() -> Self {
        let columns = Column::ALL.iter().map(|(.., kind)| match kind {
            Kind::Text => (Values::Text(Interned::default(), Vec::new()), Vec::new()),
            Kind::Number | Kind::Moment => (Values::Number(Vec::new()), Vec::new()),
        });
        Self { columns: columns.collect(), span: None }
    }

    /// The first capture and the last end, milliseconds since 1970; `None` if it is empty.
    pub(super) const fn span(&self) -> Option<(i64, i64)> {
        self.span
    }

    /// Adds a flow.
    pub(super) fn add(&mut self, record: &FlowRecord<'_>) {
        for ((column, ..), (values, known)) in Column::ALL.iter().zip(&mut self.columns) {
            match (values, cell(record, *column)) {
                (Values::Text(interned, values), Cell::Text(text)) => values.push(interned.of(&text)),
                (Values::Number(values), Cell::Number(number)) => values.push(number),
                _ => {
                    known.push(0);
                    continue;
                }
            }
            known.push(1);
        }
        let (from, to) = super::span(record);
        self.span = Some(self.span.map_or((from, to), |(first, last)| (first.min(from), last.max(to))));
    }

    fn properties(&self) -> WriterProperties {
        let mut builder = WriterProperties::builder()
            .set_compression(Compression::LZ4_RAW)
            .set_created_by(concat!("sidetrack ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_statistics_enabled(EnabledStatistics::Chunk)
            .set_offset_index_disabled(true)
            .set_bloom_filter_for_dictionary_encoded_chunks(true);
        for ((column, name, _), (values, _)) in Column::ALL.iter().zip(&self.columns) {
            let path = ColumnPath::from(*name);
            match values {
                Values::Text(interned, _) if column.is_indexed() => {
                    builder = builder
                        .set_column_bloom_filter_enabled(path.clone(), true)
                        .set_column_bloom_filter_fpp(path.clone(), FALSE_POSITIVES)
                        .set_column_bloom_filter_max_ndv(path, interned.known.len().max(1) as u64);
                }
                Values::Text(..) => {}
                Values::Number(_) => {
                    builder = builder
                        .set_column_dictionary_enabled(path.clone(), false)
                        .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED);
                }
            }
        }
        builder.build()
    }

    /// Writes the flows. The file is whole only if this succeeds.
    pub(super) fn write(&self, file: &mut File) -> Result<(), ParquetError> {
        let mut writer = SerializedFileWriter::new(file, Arc::new(schema()?), Arc::new(self.properties()))?;
        let mut group = writer.next_row_group()?;
        for (values, known) in &self.columns {
            let Some(mut column) = group.next_column()? else { break };
            match values {
                Values::Text(_, values) => {
                    column.typed::<ByteArrayType>().write_batch(values, Some(known), None)?;
                }
                Values::Number(values) => {
                    column.typed::<Int64Type>().write_batch(values, Some(known), None)?;
                }
            }
            column.close()?;
        }
        group.close()?;
        writer.close().map(|_| ())
    }
}

/// A file that is read column by column.
pub(super) struct Segment {
    reader: SerializedFileReader<File>,
    file: File,
    rows: usize,
    /// For each column its place in this file.
    places: Vec<Option<usize>>,
    loaded: Vec<Option<Loaded>>,
}

/// A column in memory.
pub(super) enum Loaded {
    /// The number of each row's text, or [`NONE`], and the texts.
    Text(Vec<u32>, Vec<ByteArray>),
    /// The number of each row.
    Number(Vec<Option<i64>>),
}

/// The number of a text that is not there.
pub(super) const NONE: u32 = u32::MAX;

impl Segment {
    /// Opens a file.
    ///
    /// # Errors
    /// It is not a file of flows.
    pub(super) fn open(file: File) -> Result<Self, ParquetError> {
        let reader = SerializedFileReader::new(file.try_clone()?)?;
        let metadata = reader.metadata();
        let rows = metadata.row_groups().iter().map(|group| group.num_rows()).sum::<i64>();
        let rows = usize::try_from(rows).unwrap_or(0);
        if metadata.num_row_groups() > 1 {
            return Err(ParquetError::General("more than one row group".to_owned()));
        }
        let schema = metadata.file_metadata().schema_descr();
        let place =
            |name: &str, kind: Kind| {
                let wanted = if kind == Kind::Text { Physical::BYTE_ARRAY } else { Physical::INT64 };
                let fits = |column: &&Arc<parquet::schema::types::ColumnDescriptor>| {
                    column.name() == name && column.physical_type() == wanted && column.max_rep_level() == 0
                };
                schema.columns().iter().find(fits).and_then(|found| {
                    schema.columns().iter().position(|column| column.name() == found.name())
                })
            };
        let places = Column::ALL.iter().map(|(_, name, kind)| place(name, *kind)).collect();
        let loaded = Column::ALL.iter().map(|_| None).collect();
        Ok(Self { reader, file, rows, places, loaded })
    }

    /// Number of flows.
    pub(super) const fn rows(&self) -> usize {
        self.rows
    }

    fn chunk(&self, column: Column) -> Option<&ColumnChunkMetaData> {
        let place = self.places[column.index()]?;
        Some(self.reader.metadata().row_groups().first()?.column(place))
    }

    /// Whether a flow in it may fulfil all of these conditions. Reads no column.
    pub(super) fn may_have(&self, required: &[Required]) -> bool {
        required.iter().all(|required| match required {
            Required::Words(property, words) => {
                Column::of_words(*property).is_none_or(|column| self.may_have_word(column, words))
            }
            Required::Ranges(property, ranges) => match Column::of(*property) {
                [column] => self.may_have_number(*column, ranges),
                _ => true,
            },
        })
    }

    fn may_have_word(&self, column: Column, words: &[String]) -> bool {
        let Some(chunk) = self.chunk(column) else { return true };
        match Sbbf::read_from_column_chunk(chunk, &self.file) {
            Ok(Some(filter)) => words.iter().any(|word| filter.check(&ByteArray::from(word.as_str()))),
            _ => true,
        }
    }

    fn may_have_number(&self, column: Column, ranges: &[RangeInclusive<u64>]) -> bool {
        let Some(Statistics::Int64(statistics)) = self.chunk(column).and_then(|chunk| chunk.statistics())
        else {
            return true;
        };
        let (Some(min), Some(max)) = (statistics.min_opt(), statistics.max_opt()) else { return true };
        // The order of columns without a sign.
        let (min, max) = (min.cast_unsigned(), max.cast_unsigned());
        ranges.iter().any(|range| *range.start() <= max && min <= *range.end() && !range.is_empty())
    }

    /// Reads columns into memory, those that are not there yet.
    ///
    /// # Errors
    /// The file is damaged.
    pub(super) fn load(&mut self, columns: impl IntoIterator<Item = Column>) -> Result<(), ParquetError> {
        for column in columns {
            let at = column.index();
            if self.loaded[at].is_some() {
                continue;
            }
            let kind = Column::ALL[at].2;
            self.loaded[at] = Some(match self.places[at] {
                Some(place) => self.read(place, kind)?,
                None if kind == Kind::Text => Loaded::Text(vec![NONE; self.rows], Vec::new()),
                None => Loaded::Number(vec![None; self.rows]),
            });
        }
        Ok(())
    }

    fn read(&self, place: usize, kind: Kind) -> Result<Loaded, ParquetError> {
        if kind != Kind::Text {
            let (known, values) = self.values::<Int64Type>(place)?;
            let mut values = values.into_iter();
            return Ok(Loaded::Number(
                known.into_iter().map(|is_there| if is_there { values.next() } else { None }).collect(),
            ));
        }
        let (known, values) = self.values::<ByteArrayType>(place)?;
        let (mut values, mut texts) = (values.into_iter(), Texts::default());
        let rows = known.into_iter().map(|is_there| match values.next_if(is_there) {
            Some(text) => texts.number(text),
            None => NONE,
        });
        let rows = rows.collect();
        Ok(Loaded::Text(rows, texts.distinct))
    }

    /// Reads one column: for each row whether it has a value, and the values.
    fn values<T: DataType>(&self, place: usize) -> Result<(Vec<bool>, Vec<T::T>), ParquetError> {
        let group = self.reader.get_row_group(0)?;
        let is_optional = self.reader.metadata().file_metadata().schema_descr().column(place).max_def_level();
        let mut reader = get_typed_column_reader::<T>(group.get_column_reader(place)?);
        let (mut values, mut levels) = (Vec::with_capacity(self.rows), Vec::with_capacity(self.rows));
        let mut rows = 0;
        while rows < self.rows {
            let (read, ..) = reader.read_records(self.rows - rows, Some(&mut levels), None, &mut values)?;
            if read == 0 {
                return Err(ParquetError::EOF("a column has fewer rows than the file".to_owned()));
            }
            rows += read;
        }
        let known = match is_optional {
            0 => vec![true; self.rows],
            most => levels.into_iter().map(|level| level == most).collect(),
        };
        Ok((known, values))
    }

    /// A column that was loaded.
    pub(super) fn loaded(&self, column: Column) -> Option<&Loaded> {
        self.loaded[column.index()].as_ref()
    }

    /// One flow. Columns that are not loaded look empty.
    pub(super) const fn row(&self, at: usize) -> RowOf<'_> {
        RowOf { segment: self, at }
    }
}

trait NextIf: Iterator {
    /// Takes the next value if `wanted`.
    fn next_if(&mut self, wanted: bool) -> Option<Self::Item> {
        if wanted { self.next() } else { None }
    }
}

impl<I: Iterator> NextIf for I {}

/// Numbers the texts of a column. Values of the same dictionary entry share their memory, so that an address tells them
/// apart faster than their bytes.
#[derive(Default)]
struct Texts {
    distinct: Vec<ByteArray>,
    known: HashMap<(usize, usize), u32, Quick>,
}

impl Texts {
    fn number(&mut self, text: ByteArray) -> u32 {
        let bytes = text.as_bytes();
        let place = (bytes.as_ptr().addr(), bytes.len());
        *self.known.entry(place).or_insert_with(|| {
            self.distinct.push(text);
            u32::try_from(self.distinct.len() - 1).unwrap_or(NONE)
        })
    }
}

/// Hashes addresses of our own memory, and numbers of texts: peers do not choose them.
pub(super) type Quick = BuildHasherDefault<Numbers>;

/// As [`Quick`].
#[derive(Default)]
pub(super) struct Numbers(u64);

impl Hasher for Numbers {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // A list of numbers comes as bytes.
        for part in bytes.chunks(8) {
            let mut number = [0; 8];
            number[..part.len()].copy_from_slice(part);
            self.write_usize(u64::from_le_bytes(number) as usize);
        }
    }

    fn write_usize(&mut self, number: usize) {
        self.0 = (self.0.rotate_left(5) ^ number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// One flow of a [`Segment`].
pub(super) struct RowOf<'a> {
    segment: &'a Segment,
    at: usize,
}

impl Row for RowOf<'_> {
    fn text(&self, column: Column) -> Option<&str> {
        let Some(Loaded::Text(rows, texts)) = self.segment.loaded(column) else { return None };
        let number = rows.get(self.at).filter(|number| **number != NONE)?;
        std::str::from_utf8(texts.get(*number as usize)?.data()).ok()
    }

    fn number(&self, column: Column) -> Option<i64> {
        let Some(Loaded::Number(rows)) = self.segment.loaded(column) else { return None };
        rows.get(self.at).copied().flatten()
    }
}
