"""Hides how a worker process comes to be: forked from a template that has imported once what all workers need, so that it starts in milliseconds.

The template has one thread and runs no work, so nothing is locked or half done in what it forks.  It is started as `python -c`: the caller's script
needs no `__main__` guard, and no lock or descriptor of the caller is inherited.  It ends when its parent does, its workers when it does; also one
that is stopped, except where its parent is killed by SIGKILL before it has said so (its first 50 ms).  A worker stays a zombie until its end has been
asked for here, so its number never means another process.  Nobody waits for ever for a template that is stopped (it is ended as soon as that is seen)
or hangs: calls in hand fail as when their worker died.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn

from mmcompile.errors import EngineError

__all__ = ["Template", "WorkerProcess"]

_PR_SET_PDEATHSIG = 1
#: A request: its letter and a process number; the reply is one number.
_REQUEST, _REPLY = struct.Struct("<cq"), struct.Struct("<q")
_FORK, _REAP = b"F", b"R"
#: The reply to _REAP while the process lives; no exit code is so far from 0.
_LIVES = 1 << 32
#: One thread each, as workers share the cores.  And for glibc: memory of a picture is kept for the next one (up to 128 MiB), as a fresh page costs
#: a microsecond or two: on 12 megapixels that is a third of the time.
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
#: Seconds between two looks at a process that is about to end: what follows the end of its pipe.
_REAP_S = 0.002
#: Seconds for the first reply of a template, which comes when all is loaded (a second or two; from a slow file system a minute), and for any later
#: one, which takes milliseconds (a fork on a machine that swaps: seconds).  One that takes longer is ended.
_LOAD_S, _REPLY_S = 120.0, 30.0
#: Seconds between two looks at whether a template that does not answer is stopped.  One that is so twice was not stopped together with this process,
#: as by Ctrl-Z: those go on together.
_LOOK_S = 1.0
#: Templates that may end before a worker is forked, and how many of them because they did not answer: each may cost its whole limit.
_TRIES, _SILENT = 5, 2
#: Seconds that an order to end a worker waits for a question about it, before the template that does not answer it is ended instead.
_PATIENCE_S = 1.0
#: Seconds for a killed template to be gone: one that reads from a disk which hangs goes only when that answers.
_END_S = 5.0
#: Bytes of what a process said last that are looked at for its last line.
_SAID_BYTES = 2000


class Template:
    """The template of one executor, started at the first `fork`, or in the background by `prepare`; safe in several threads."""

    def __init__(self) -> None:
        self._mutex, self._starting = threading.Lock(), threading.Lock()
        self._prepare: bytes = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._keeper: threading.Thread | None = None
        self._limit_s = _LOAD_S
        self._closed = False

    def prepare(self, fn: Callable[[], Any]) -> None:
        """Begin now, if that has not been done, and call `fn` in the template: what it loads is there in every worker.

        What goes wrong in it is no error: a worker then finds out itself.  Neither is a thread that it starts, but then it was for nothing.
        """
        self._prepare = pickle.dumps(fn)
        with contextlib.suppress(EngineError):  # said again by the first fork
            self._start()

    def fork(self) -> WorkerProcess:
        """A new worker.  Raises EngineError where none can be started."""
        try:
            ours, theirs = Pipe()
            log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        except OSError as error:
            raise EngineError(f"cannot start a worker process: {error.strerror}") from error
        try:
            with theirs:
                pid = self._fork([theirs.fileno(), log.fileno()])
        except BaseException:
            ours.close()
            log.close()
            raise
        return WorkerProcess(self, pid, ours, log)

    def reap(self, pid: int) -> int | None:
        """The exit code of a worker (negative: the signal), once; None while it lives."""
        try:
            code = self._request(_REAP, pid, [], again=False)
        except TimeoutError:
            code = None
        if code is None:
            return -signal.SIGKILL  # the template is gone, and its workers with it
        return None if code == _LIVES else code

    def interrupt(self) -> None:
        """End this template, and with it its workers; the next fork starts another."""
        process, control = self._process, self._socket
        if process is not None:
            process.kill()
        if control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)  # who waits for a reply is told now, even if it cannot die yet
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)

    def kill(self) -> None:
        """End the template now, and with it all workers, for good."""
        self._closed = True
        self.interrupt()
        if self._keeper is not None:  # one that was just being started is ended by its thread
            self._keeper.join(_END_S)
        with self._mutex:
            self._drop()
        atexit.unregister(self.kill)

    def _fork(self, fds: list[int]) -> int:
        """The number of a new process.  Raises EngineError."""
        silent = 0
        for _ in range(_TRIES):
            try:
                pid = self._request(_FORK, 0, fds)
            except TimeoutError:
                pid, silent = None, silent + 1
                if silent == _SILENT:
                    raise EngineError(
                        f"cannot start a worker process: its template did not answer, {_SILENT} times (it was stopped, or silent for {_LOAD_S:.0f} "
                        "s); see what stops processes or holds up this machine, then run the same command again"
                    ) from None
            if pid is not None and pid < 0:
                raise EngineError(f"cannot start a worker process: {os.strerror(-pid)}")
            if pid is not None:
                return pid
            self._prepare = b""  # it was killed while it loaded, or by what it loaded: again, and without that
        raise EngineError(f"cannot start a worker process: its template ended {_TRIES} times; see what kills processes here (out of memory?)")

    def _request(self, letter: bytes, pid: int, fds: list[int], again: bool = True) -> int | None:
        """The reply; None where the template has ended.  TimeoutError where it did not answer, and was ended for that."""
        with self._mutex:
            if again:
                self._start()
            if self._socket is None:
                return None
            try:
                socket.send_fds(self._socket, [_REQUEST.pack(letter, pid)], fds)
                reply = self._reply(self._socket)
            except TimeoutError:
                self.interrupt()
                self._drop()
                raise
            except OSError:
                reply = b""
            if len(reply) < _REPLY.size:
                self._drop()
                return None
            self._limit_s = _REPLY_S
            return int(_REPLY.unpack(reply)[0])

    def _reply(self, control: socket.socket) -> bytes:
        """What the template answers.  TimeoutError where it does not: it is stopped, or takes longer than it may."""
        end, stopped = time.monotonic() + self._limit_s, False
        while True:
            control.settimeout(max(0.001, min(_LOOK_S, end - time.monotonic())))
            try:
                return control.recv(_REPLY.size, socket.MSG_WAITALL)
            except TimeoutError:
                before, stopped = stopped, self._process is not None and _is_stopped(self._process.pid)
                if time.monotonic() >= end or (before and stopped):
                    raise

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _start(self) -> None:
        with self._starting:
            if self._socket is not None:
                return
            if self._closed:
                raise EngineError("cannot start a worker process: all were ended")
            started: list[BaseException | None] = []
            begun = threading.Event()
            # A thread of its own, which lives as long as the template: PR_SET_PDEATHSIG goes by the thread that starts a process.
            if self._keeper is None:
                atexit.register(self.kill)
            self._keeper = threading.Thread(target=self._keep, args=(started, begun), name="mmcompile-template", daemon=True)
            self._keeper.start()
            begun.wait()
            if started:
                error = started[0]
                raise EngineError(f"cannot start a worker process: {getattr(error, 'strerror', None) or error}") from error

    def _keep(self, failed: list[BaseException | None], begun: threading.Event) -> None:
        ours = process = None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                code = (
                    f"import sys; sys.path[:] = {sys.path!r}; from mmcompile.compiler.template import _serve; "
                    f"_serve({theirs.fileno()}, {os.getpid()}, {self._prepare!r})"
                )
                process = subprocess.Popen(
                    # File names must mean the same on both sides.
                    [sys.executable, "-X", f"utf8={sys.flags.utf8_mode}", "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ENVIRONMENT},
                    cwd=_folder(),
                )
        except OSError as error:
            if ours is not None:
                ours.close()
            failed.append(error)
            begun.set()
            return
        self._process, self._socket, self._limit_s = process, ours, _LOAD_S
        if self._closed:
            process.kill()
        begun.set()
        process.wait()


class WorkerProcess:
    """A worker: the pipe to it, and its end."""

    def __init__(self, template: Template, pid: int, pipe: Connection[Any, Any], log: IO[bytes]) -> None:
        self._template, self._lock = template, threading.Lock()
        self.pid, self.pipe, self._log = pid, pipe, log
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code (negative: the signal); None while it lives."""
        with self._lock:
            if self._code is None:
                self._code = self._template.reap(self.pid)
            return self._code

    def wait(self) -> int:
        """The exit code of a process that is about to end."""
        while (code := self.poll()) is None:
            time.sleep(_REAP_S)
        return code

    def kill(self) -> None:
        """End it now; with all others of its template where that is asked about it and does not answer."""
        if not self._lock.acquire(timeout=_PATIENCE_S):
            self._template.interrupt()
            return
        try:
            if self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
        finally:
            self._lock.release()

    def said(self) -> str:
        """The last line that it wrote to its output."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _SAID_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Let it end: it does when its pipe is closed."""
        self.pipe.close()
        self.wait()
        self._log.close()


def _is_stopped(pid: int) -> bool:
    """Has somebody stopped this process (SIGSTOP, SIGTSTP)?"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False


def _folder() -> str | None:
    """Where a worker starts: here (None), or in / where this process's folder was deleted, in which libraries fail to load."""
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


# ---------------------------------------------------------------- in the template


def _end_with(parent: int) -> None:
    """End when the parent ends, or at once if it has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _serve(fd: int, parent: int, prepare: bytes) -> NoReturn:
    """The template's main loop: fork and reap as asked, until the parent closes the socket or dies."""
    _end_with(parent)
    if prepare:
        with contextlib.suppress(Exception):
            pickle.loads(prepare)()
        if not _is_single():
            code = f"import sys; sys.path[:] = {sys.path!r}; from mmcompile.compiler.template import _serve; _serve({fd}, {parent}, b'')"
            os.set_inheritable(fd, True)
            os.execv(sys.executable, [sys.executable, "-X", f"utf8={sys.flags.utf8_mode}", "-c", code])
    from mmcompile.compiler.engines import _work

    gc.collect()
    gc.freeze()  # what is here is shared with all workers: the collector must not touch it
    control = socket.socket(fileno=fd)
    me = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, _REQUEST.size, 2)
        if len(data) < _REQUEST.size:
            os._exit(0)
        letter, pid = _REQUEST.unpack(data)
        if letter == _REAP:
            reply = _reap(pid)
        else:
            try:
                reply = os.fork()
            except OSError as error:
                reply = -(error.errno or 1)
            if reply == 0:
                _become(me, fds)
                _work(fds[0])
            for passed in fds:
                os.close(passed)
        control.sendall(_REPLY.pack(reply))


def _is_single() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _reap(pid: int) -> int:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if found else _LIVES


def _become(template: int, fds: list[int]) -> None:
    """Make a forked process a worker: it has its pipe and its log, and nothing else of the template."""
    _end_with(template)
    pipe, log = fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
