//! Stored responses on disk, behind those in memory. Each is one file and survives the process, also a crash.
//!
//! Workers never block on the disk: threads of the store write, find and remove files, and a worker reads content only
//! if the kernel has it in memory. A full, read-only or broken disk costs stored responses, never a request.

mod file;
mod fill;
mod index;
mod io;

pub(super) use fill::Fill;
pub use index::Which;

use super::content::{Content, End};
use super::store::Object;
use file::{Folder, Writing, read_block, read_block_at_hand, rewrite_head};
use index::{Claim, Filed, Index};
use io::Io;
use sidetrack_core::http::cache::file::{BLOCK, Plan, variant_of};
use sidetrack_core::http::cache::{Rules, Stored};
use sidetrack_sys::sync::lock;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

/// Content up to this size is loaded into memory when it is found, in bytes.
const INTO_MEMORY_MAX: u64 = 1 << 20;
/// Threads that read and remove files.
const READERS: usize = 4;
/// Most bytes that wait to be written. Responses beyond that are not kept on disk.
const WAITING_MAX: u64 = 64 << 20;
/// How long writing pauses after the disk was full.
const PAUSE_FULL: Duration = Duration::from_secs(2);
/// How long writing pauses after another failure.
const PAUSE: Duration = Duration::from_secs(30);
/// Time after a pause without another failure, after which writing works again.
const CALM: Duration = Duration::from_secs(5);
/// How long a start waits for the scan. The scan then continues while requests are served.
const SCAN_WAIT: Duration = Duration::from_secs(2);
/// How long a file that is being written may take when another process is to use the folder.
const REST_WAIT: Duration = Duration::from_secs(2);
/// If the disk is full, 1/`ROOM_PART` of the stored bytes is evicted.
const ROOM_PART: u64 = 16;

/// The open stores of this process by folder, so that a listener that is set up again continues with its store.
static OPEN: Mutex<Vec<(PathBuf, Weak<Disk>)>> = Mutex::new(Vec::new());

/// The store on disk.
#[derive(Debug)]
pub struct Disk {
    folder: Folder,
    index: Index,
    reads: Io,
    writes: Io,
    waiting: AtomicU64,
    paused_until: Mutex<Option<(Instant, String)>>,
    /// Writing fails, and the log says so.
    failing: AtomicBool,
    /// Responses that were not written since the start because writing failed or was paused.
    unwritten: AtomicU64,
    scanned: (Mutex<bool>, Condvar),
    /// Files that turned out to be corrupt.
    broken: AtomicU64,
    /// Locks the folder against other processes. `None` while another process of this node uses it.
    lock: Mutex<Option<File>>,
    /// Another process of this node may use the folder: nothing is written, found or removed here.
    rests: AtomicBool,
}

/// Locks a folder against other processes.
fn lock_folder(path: &Path) -> std::io::Result<File> {
    let holding = File::create(path.join("lock"))?;
    holding.try_lock().map_err(|error| match error {
        std::fs::TryLockError::WouldBlock => {
            std::io::Error::new(ErrorKind::ResourceBusy, "another sidetrack uses it")
        }
        std::fs::TryLockError::Error(error) => error,
    })?;
    Ok(holding)
}

/// The state of a store on disk, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskState {
    /// Resources.
    pub keys: usize,
    /// Files: the variants of the resources.
    pub files: usize,
    /// Bytes of the files.
    pub bytes: u64,
    /// Most bytes.
    pub capacity: u64,
    /// All files of an earlier process were found.
    pub is_scanned: bool,
    /// Files that were corrupt and have been removed.
    pub broken: u64,
    /// Why the last file could not be written.
    pub trouble: Option<String>,
    /// Responses that were not written since the start because writing failed or was paused.
    pub unwritten: u64,
}

impl Disk {
    /// Opens the store in this folder, or returns the one that is open.
    ///
    /// # Errors
    /// The folder cannot be made or written to, or another process uses it.
    pub fn open(path: &Path, capacity: u64, rules: &Rules, is_hurried: bool) -> std::io::Result<Arc<Self>> {
        let mut open = lock(&OPEN);
        open.retain(|(_, disk)| disk.strong_count() > 0);
        let known = open.iter().find(|(other, _)| other == path).and_then(|(_, disk)| disk.upgrade());
        if let Some(disk) = known {
            disk.forget(disk.index.resize(capacity));
            return Ok(disk);
        }
        let folder = Folder::make(path)?;
        let holding = lock_folder(path)?;
        let disk = Arc::new(Self {
            folder,
            index: Index::new(capacity),
            reads: Io::start("cache-read", READERS)?,
            writes: Io::start("cache-write", 1)?,
            waiting: AtomicU64::new(0),
            paused_until: Mutex::default(),
            failing: AtomicBool::new(false),
            unwritten: AtomicU64::new(0),
            scanned: Default::default(),
            broken: AtomicU64::new(0),
            lock: Mutex::new(Some(holding)),
            rests: AtomicBool::new(false),
        });
        disk.scan(rules.clone())?;
        open.push((path.to_owned(), Arc::downgrade(&disk)));
        // Release the lock before waiting: other listeners can open their stores meanwhile.
        drop(open);
        if !is_hurried {
            disk.wait_for_scan();
        }
        Ok(disk)
    }

    /// Lets another process of this node use the folder. Waits until files that are being written are there, or given up. Content
    /// of files that are open is read on.
    pub fn rest(&self) {
        if self.rests.swap(true, Relaxed) {
            return;
        }
        // Without an entry no file is found, replaced or removed, and claims of writers are void.
        self.index.forget_all();
        // The queue is in order: when this job runs, no file is being written.
        let (done, finished) = std::sync::mpsc::channel::<()>();
        self.writes.send(move || drop(done));
        // The sender is dropped, or the disk hangs.
        let _ = finished.recv_timeout(REST_WAIT);
        *lock(&self.lock) = None;
    }

    /// Uses the folder again, and finds what the other process has stored. If it still uses the folder, this store stays empty.
    pub fn resume(self: &Arc<Self>, rules: &Rules) {
        if !self.rests.load(Relaxed) {
            return;
        }
        let again = lock_folder(self.folder.root()).and_then(|holding| {
            *lock(&self.lock) = Some(holding);
            self.index.forget_all();
            self.rests.store(false, Relaxed);
            self.scan(rules.clone())
        });
        if let Err(error) = again {
            tracing::error!(folder = %self.folder, %error, "the cache keeps nothing on disk until a restart");
        }
    }

    /// Removes a file, unless another process may use it.
    fn remove_files(&self, numbers: impl IntoIterator<Item = u64>) {
        if !self.rests.load(Relaxed) {
            numbers.into_iter().for_each(|number| self.folder.remove(number));
        }
    }

    fn scan(self: &Arc<Self>, rules: Rules) -> std::io::Result<()> {
        let disk = self.clone();
        let scan = move || {
            for number in disk.folder.numbers().unwrap_or_default() {
                match disk.folder.find(number, &rules) {
                    Ok(found) => {
                        let bytes = found.plan.file_bytes();
                        let file = Filed { number, bytes, variant: variant_of(&found.stored) };
                        disk.remove_files(disk.index.found(&found.key, file));
                    }
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => disk.is_broken(number, &error),
                }
            }
            disk.index.scanned();
            *lock(&disk.scanned.0) = true;
            disk.scanned.1.notify_all();
        };
        std::thread::Builder::new().name("cache-scan".to_owned()).spawn(scan).map(|_| ())
    }

    fn wait_for_scan(&self) {
        let done = lock(&self.scanned.0);
        // Late or poisoned: the scan goes on in its thread.
        let _ = self.scanned.1.wait_timeout_while(done, SCAN_WAIT, |done| !*done);
    }

    fn is_broken(&self, number: u64, error: &std::io::Error) {
        self.broken.fetch_add(1, Relaxed);
        tracing::warn!(path = %self.folder.path(number).display(), %error, "removed from the cache");
        self.remove_files([number]);
    }

    /// Loads all responses stored under a key, with a claim that is void once they are removed; `None` if there are none.
    pub async fn load(self: &Arc<Self>, key: &[u8], rules: &Rules) -> Option<(Vec<Arc<Object>>, Arc<Claim>)> {
        let (files, claim) = self.index.find(key)?;
        let (disk, key, rules) = (self.clone(), key.to_vec(), rules.clone());
        let read = move || files.into_iter().filter_map(|file| disk.read(file, &key, &rules)).collect();
        let objects: Vec<_> = self.reads.run(read).await?;
        (!objects.is_empty()).then_some((objects, claim))
    }

    /// Whether a response is stored under a key.
    pub fn has(&self, key: &[u8]) -> bool {
        self.index.has(key)
    }

    /// Reads one file; removes it if it is corrupt.
    fn read(self: &Arc<Self>, filed: Filed, key: &[u8], rules: &Rules) -> Option<Arc<Object>> {
        let number = filed.number;
        let read = || {
            let found = self.folder.find(number, rules)?;
            if found.key != key {
                return Err(std::io::Error::new(ErrorKind::InvalidData, "it holds another key"));
            }
            let content = if found.plan.length <= INTO_MEMORY_MAX {
                Content::of_pieces(found.content()?)
            } else {
                let (disk, key) = (self.clone(), key.to_vec());
                let (plan, sums, open) = (found.plan, found.sums()?, Mutex::default());
                Content::on_disk(OnDisk { disk, key, number, plan, sums, open })
            };
            Ok(Arc::new(Object { stored: found.stored, content: Arc::new(content) }))
        };
        match read() {
            Ok(object) => Some(object),
            Err(error) => {
                self.index.remove_file(key, number);
                // It was replaced or evicted meanwhile, which is not a fault.
                if error.kind() != ErrorKind::NotFound {
                    self.is_broken(number, &error);
                }
                None
            }
        }
    }

    /// Stores an object whose content is complete and in memory, unless writing is paused or too many bytes wait.
    pub fn put(self: &Arc<Self>, key: &[u8], object: &Arc<Object>) {
        let length = object.content.length;
        let is_far_behind = self.waiting.load(Relaxed).saturating_add(length) > WAITING_MAX;
        if is_far_behind || !object.stored.is_worth_keeping() || self.is_paused() || self.rests.load(Relaxed)
        {
            return;
        }
        let claim = self.index.claim(key);
        self.waiting.fetch_add(length, Relaxed);
        let (disk, key, object) = (self.clone(), key.to_vec(), object.clone());
        self.writes.send(move || {
            if !claim.is_void()
                && let Some(pieces) = object.content.in_memory()
                && let Err(error) = disk.write(&claim, &key, &object.stored, &pieces)
            {
                disk.is_in_trouble(&error);
            }
            disk.waiting.fetch_sub(length, Relaxed);
        });
    }

    fn write(&self, claim: &Claim, key: &[u8], stored: &Stored, pieces: &[Arc<[u8]>]) -> std::io::Result<()> {
        let number = self.new_number();
        let length = pieces.iter().map(|piece| piece.len() as u64).sum();
        let mut writing = Writing::begin(&self.folder, number, key, stored, length)?;
        let bytes = writing.file_bytes();
        // Reserve, write, and only then enter: the index never names an incomplete file.
        let Some(gone) = self.index.reserve(bytes) else { return Ok(()) };
        self.remove_files(gone);
        let written = pieces.iter().try_for_each(|piece| writing.push(piece)).and_then(|()| writing.finish());
        if let Err(error) = written {
            self.index.release(bytes);
            return Err(error);
        }
        let filed = Filed { number, bytes, variant: variant_of(stored) };
        self.remove_files(self.index.commit(claim, filed));
        self.works();
        Ok(())
    }

    /// A random number of 64 bits for a new file; a collision is not expected.
    fn new_number(&self) -> u64 {
        u64::from_be_bytes(sidetrack_sys::random::bytes())
    }

    /// Begins the copy of a passing response, of at most `most` bytes. It will replace one of the same variant. `None` while
    /// writing is paused.
    pub fn fill(self: &Arc<Self>, key: &[u8], stored: &Stored, most: u64) -> Option<Fill> {
        if !stored.is_worth_keeping() || self.is_paused() || self.rests.load(Relaxed) {
            return None;
        }
        let claim = self.index.claim(key);
        Some(Fill::new(self.clone(), claim, key, stored.clone(), most))
    }

    /// Pauses writing after a failure. If the disk is full, some stored responses are evicted.
    fn is_in_trouble(&self, error: &std::io::Error) {
        let is_full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        let pause = if is_full { PAUSE_FULL } else { PAUSE };
        if is_full {
            self.remove_files(self.index.make_room(ROOM_PART));
        }
        let said = format!("{error}; not written to for {} s", pause.as_secs());
        self.unwritten.fetch_add(1, Relaxed);
        if !self.failing.swap(true, Relaxed) {
            tracing::warn!(
                folder = %self.folder,
                error = said,
                "the cache's disk is in trouble; requests are not. Make room, or allow writing there: it is tried again after each pause"
            );
        }
        *lock(&self.paused_until) = Some((Instant::now() + pause, said));
    }

    /// Notes that a file was written.
    /// A full disk takes some files again after each eviction, so that one file says little.
    fn works(&self) {
        let is_calm = |(until, _): &(Instant, String)| *until + CALM <= Instant::now();
        if !self.failing.load(Relaxed) || !lock(&self.paused_until).as_ref().is_none_or(is_calm) {
            return;
        }
        if self.failing.swap(false, Relaxed) {
            *lock(&self.paused_until) = None;
            tracing::info!(folder = %self.folder, "the cache's disk is written to again");
        }
    }

    /// Whether writing is paused. Then a response is counted that is not written.
    fn is_paused(&self) -> bool {
        let is_paused = lock(&self.paused_until).as_ref().is_some_and(|(until, _)| *until > Instant::now());
        self.unwritten.fetch_add(u64::from(is_paused), Relaxed);
        is_paused
    }

    /// Why the last file could not be written.
    fn trouble(&self) -> Option<String> {
        lock(&self.paused_until).as_ref().map(|(_, why)| why.clone())
    }

    /// Updates the head of a stored response (a 304 came); stores the response if it is not on disk yet.
    pub fn update(self: &Arc<Self>, key: &[u8], object: &Arc<Object>) {
        let Some(number) = self.index.number_of(key, variant_of(&object.stored)) else {
            return self.put(key, object);
        };
        let (disk, key, object) = (self.clone(), key.to_vec(), object.clone());
        self.writes.send(move || match rewrite_head(&disk.folder, number, &key, &object.stored) {
            Ok(true) => {}
            // There is no room for the new head. The old one must not stay, because it is outdated.
            Ok(false) => disk.remove_number(&key, number),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                disk.remove_number(&key, number);
                disk.is_in_trouble(&error);
            }
        });
    }

    fn remove_number(&self, key: &[u8], number: u64) {
        self.index.remove_file(key, number);
        self.remove_files([number]);
    }

    /// Removes keys: requests do not find them from now on. A thread removes their files soon.
    pub fn remove(self: &Arc<Self>, which: &Which) {
        self.forget(self.index.remove(which).0);
    }

    /// Removes keys and waits until their files are gone, so that no crash brings them back. Returns the removed keys.
    /// Blocks.
    pub fn purge(&self, which: &Which) -> Vec<Arc<[u8]>> {
        let (gone, keys) = self.index.remove(which);
        self.remove_files(gone);
        keys
    }

    /// Like [`Self::purge`], without blocking the worker.
    pub async fn purge_behind(self: &Arc<Self>, which: Which) -> Vec<Arc<[u8]>> {
        let disk = self.clone();
        self.reads.run(move || disk.purge(&which)).await.unwrap_or_default()
    }

    /// Removes one variant.
    pub fn remove_variant(self: &Arc<Self>, key: &[u8], stored: &Stored) {
        // It may still be on its way to the disk. Other writes under way for this key are lost, too, and are fetched again.
        self.index.void(key);
        if let Some(number) = self.index.number_of(key, variant_of(stored)) {
            self.index.remove_file(key, number);
            self.forget(vec![number]);
        }
    }

    /// Lets a thread remove files that left the index.
    fn forget(self: &Arc<Self>, gone: Vec<u64>) {
        if !gone.is_empty() {
            let disk = self.clone();
            self.reads.send(move || disk.remove_files(gone));
        }
    }

    /// The first `most` keys with this prefix in order, with the bytes of their files.
    pub fn list(&self, start: &[u8], most: usize) -> Vec<(Arc<[u8]>, u64)> {
        self.index.list(start, most)
    }

    /// The state for reports.
    pub fn state(&self) -> DiskState {
        let (keys, files, bytes, capacity) = self.index.counts();
        let (broken, is_scanned) = (self.broken.load(Relaxed), self.index.is_scanned());
        let unwritten = self.unwritten.load(Relaxed);
        DiskState { keys, files, bytes, capacity, is_scanned, broken, trouble: self.trouble(), unwritten }
    }
}

/// Content in a file.
#[derive(Debug)]
pub struct OnDisk {
    disk: Arc<Disk>,
    key: Vec<u8>,
    number: u64,
    plan: Plan,
    sums: Vec<u64>,
    /// The open file, while a request reads from it.
    open: Mutex<Weak<File>>,
}

impl OnDisk {
    /// Bytes of content.
    pub const fn length(&self) -> u64 {
        self.plan.length
    }

    /// Bytes of memory used.
    pub fn memory_bytes(&self) -> usize {
        self.sums.len() * 8 + self.key.len()
    }

    /// The index of the block that contains this byte, and the position of that block's first byte.
    pub fn block_of(&self, position: u64) -> (usize, u64) {
        let block = BLOCK as u64;
        let index = (position / block).min(self.plan.blocks());
        (usize::try_from(index).unwrap_or(usize::MAX), index * block)
    }

    /// Opens the file, or shares it with requests that read it already.
    ///
    /// # Errors
    /// It was removed, or cannot be opened.
    pub async fn open(&self) -> std::io::Result<Arc<File>> {
        if let Some(file) = lock(&self.open).upgrade() {
            return Ok(file);
        }
        let path = self.disk.folder.path(self.number);
        let opened = self.disk.reads.run(move || File::open(path)).await;
        let opened = opened.unwrap_or_else(|| Err(std::io::Error::other("a thread failed")));
        let file = Arc::new(opened.inspect_err(|_| self.disk.index.remove_file(&self.key, self.number))?);
        *lock(&self.open) = Arc::downgrade(&file);
        Ok(file)
    }

    /// Reads one block. If that fails, returns none and [`End::Cut`], and removes the file.
    pub async fn piece(&self, index: usize) -> (Vec<Arc<[u8]>>, End) {
        let number = index as u64;
        let Some(sum) = self.sums.get(index).copied() else { return (Vec::new(), End::Whole) };
        let end = if index + 1 == self.sums.len() { End::Whole } else { End::Coming };
        match self.read((number, sum)).await {
            Ok(block) => (vec![block], end),
            Err(error) => {
                self.disk.index.remove_file(&self.key, self.number);
                self.disk.is_broken(self.number, &error);
                (Vec::new(), End::Cut)
            }
        }
    }

    async fn read(&self, (number, sum): (u64, u64)) -> std::io::Result<Arc<[u8]>> {
        let file = self.open().await?;
        if let Some(block) = read_block_at_hand(&file, &self.plan, (number, sum))? {
            return Ok(block);
        }
        let plan = self.plan;
        let read = self.disk.reads.run(move || read_block(&file, &plan, (number, sum))).await;
        read.unwrap_or_else(|| Err(std::io::Error::other("a thread failed")))
    }
}
