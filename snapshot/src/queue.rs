//! One stack of tasks for several threads. What a task adds is done before what lay below it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

pub struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    tasks: Vec<T>,
    running: usize,
    /// Threads that wait for a task.
    waiting: usize,
    stopped: bool,
}

/// A task that was taken; it counts as running until this is dropped.
pub struct Running<'a, T>(&'a Queue<T>);

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { state: Mutex::new(State { tasks: Vec::new(), running: 0, waiting: 0, stopped: false }), changed: Condvar::new() }
    }
}

impl<T> Queue<T> {
    pub fn new(first: T) -> Self {
        let queue = Self::default();
        queue.push(vec![first]);
        queue
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds tasks; the first of them is taken first.
    pub fn push(&self, tasks: Vec<T>) {
        let added = tasks.len();
        let mut state = self.state();
        state.tasks.extend(tasks.into_iter().rev());
        let wake = added.min(state.waiting);
        drop(state);
        match wake {
            0 => {}
            1 => self.changed.notify_one(),
            _ => self.changed.notify_all(),
        }
    }

    /// The next task. `None`: nothing is left and nothing is running that could add more, or the queue was stopped.
    pub fn next(&self) -> Option<(T, Running<'_, T>)> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(task) = state.tasks.pop() {
                state.running += 1;
                return Some((task, Running(self)));
            }
            if state.running == 0 {
                return None;
            }
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    pub fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_all();
    }
}

impl<T> Drop for Running<'_, T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.running -= 1;
        // Whoever panics leaves work undone that others would wait for.
        state.stopped |= std::thread::panicking();
        let over = state.waiting > 0 && (state.stopped || (state.running == 0 && state.tasks.is_empty()));
        drop(state);
        if over {
            self.0.changed.notify_all();
        }
    }
}
