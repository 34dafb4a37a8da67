//! Locks whose holder may have panicked. The panic of one task does not stop the others: they go on with the value as it is.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Waits for the mutex. Takes it over if a thread panicked while it held it.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for read access. Takes the lock over if a thread panicked while it wrote.
pub fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for write access. Takes the lock over if a thread panicked while it wrote.
pub fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_whose_holder_panicked_is_taken_over() {
        let (mutex, rw) = (Mutex::new(1), RwLock::new(2));
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let (_mutex, _rw) = (lock(&mutex), write(&rw));
                panic!("expected");
            });
            assert!(holder.join().is_err());
        });
        assert!(mutex.is_poisoned() && rw.is_poisoned());
        *lock(&mutex) += 10;
        *write(&rw) += 20;
        assert_eq!((*lock(&mutex), *read(&rw)), (11, 22));
    }
}
