# Types of the compiled module, after csrc/aio/aio.h: structs by name, pointers as opaque classes.

from collections.abc import Callable, Sequence
from typing import Final, Literal, overload

from cffi import FFI

# Any pointer that Python only passes on.
class Pointer:
    def __add__(self, count: int) -> Pointer: ...

class Aio(Pointer): ...

class AioOut(Pointer):
    def __getitem__(self, index: Literal[0]) -> Aio: ...

class Ids(Pointer):
    def __getitem__(self, index: Literal[0]) -> int: ...

class Count(Pointer):
    def __getitem__(self, index: Literal[0]) -> int: ...
    def __setitem__(self, index: Literal[0], value: int) -> None: ...

class FaultRuleStruct:
    action: int
    op: int
    first: int
    every: int
    value: int

class FaultsStruct:
    refuse_uring_errno: int
    refuse_register_errno: int
    refuse_direct_errno: int
    force_alignment_bytes: int
    force_memory_alignment_bytes: int
    max_transfer_bytes: int
    rules: Sequence[FaultRuleStruct]

class Options(Pointer):
    block_bytes: int
    queue_depth: int
    threads: int
    backend: int
    max_files: int
    direct: int
    faults: FaultsStruct

class Request(Pointer):
    op: int
    file: int
    buffer: Pointer
    bytes: int
    offset: int
    after: int
    tag: int

class Result(Pointer):
    id: int
    tag: int
    done_bytes: int
    asked_bytes: int
    error_offset: int
    queue_ns: int
    device_ns: int
    error: int
    backend: int

class Results(Pointer):
    def __getitem__(self, index: int) -> Result: ...

class FileInfoStruct(Pointer):
    direct: int
    direct_errno: int
    memory_align_bytes: int
    offset_align_bytes: int

class Stats(Pointer):
    backend: int
    backend_errno: int
    fixed_files: int
    register_errno: int
    registered_bytes: int
    read_bytes: int
    written_bytes: int
    read_blocks: int
    written_blocks: int
    buffered_blocks: int
    retries: int
    short_transfers: int
    pending_requests: int
    ended_requests: int
    busy_ns: int
    queue_ns: int
    device_ns: int
    waits: int
    waited_ns: int

class Memory(Pointer):
    address: Pointer
    bytes: int
    huge_bytes: int
    pages: int
    owner: int

class Ffi:
    @overload
    def new(self, cdecl: Literal["struct aio **"]) -> AioOut: ...
    @overload
    def new(self, cdecl: Literal["struct aio_options *"]) -> Options: ...
    @overload
    def new(self, cdecl: Literal["struct aio_request *"]) -> Request: ...
    @overload
    def new(self, cdecl: Literal["struct aio_result *"]) -> Result: ...
    @overload
    def new(self, cdecl: Literal["struct aio_file_info *"]) -> FileInfoStruct: ...
    @overload
    def new(self, cdecl: Literal["struct aio_stats *"]) -> Stats: ...
    @overload
    def new(self, cdecl: Literal["struct aio_memory *"]) -> Memory: ...
    @overload
    def new(self, cdecl: Literal["uint64_t[1]"]) -> Ids: ...
    @overload
    def new(self, cdecl: Literal["struct aio_result[]"], count: int) -> Results: ...
    @overload
    def new(self, cdecl: Literal["uint32_t *"]) -> Count: ...
    @overload
    def cast(self, cdecl: Literal["uintptr_t"], value: Pointer) -> int: ...
    @overload
    def cast(self, cdecl: Literal["void *"], value: int) -> Pointer: ...
    @overload
    def cast(self, cdecl: Literal["char *"], value: Pointer) -> Pointer: ...
    @overload
    def gc(self, cdata: Memory, destructor: Callable[[Memory], object]) -> Memory: ...
    @overload
    def gc(self, cdata: Pointer, destructor: Callable[[Pointer], object]) -> Pointer: ...
    def buffer(self, cdata: Pointer, size: int) -> FFI.buffer: ...

class Lib:
    AIO_READ: Final[int]
    AIO_WRITE: Final[int]
    AIO_DIRECT_AUTO: Final[int]
    AIO_DIRECT_OFF: Final[int]
    AIO_PAGES_AUTO: Final[int]
    AIO_PAGES_SMALL: Final[int]
    AIO_PAGES_TRANSPARENT: Final[int]
    AIO_PAGES_RESERVED: Final[int]
    def aio_open(self, options: Options, out: AioOut) -> int: ...
    def aio_close(self, aio: Aio, timeout_us: int) -> int: ...
    def aio_path_add(self, aio: Aio) -> int: ...
    def aio_path_stats(self, aio: Aio, path: int, stats: Stats) -> int: ...
    def aio_register(self, aio: Aio, address: Pointer, nbytes: int) -> int: ...
    def aio_file_open(self, aio: Aio, path: int, name: bytes, info: FileInfoStruct) -> int: ...
    def aio_file_close(self, aio: Aio, file: int) -> int: ...
    def aio_file_sync(self, aio: Aio, file: int) -> int: ...
    def aio_submit(self, aio: Aio, requests: Request, count: int, ids: Ids) -> int: ...
    def aio_wait(self, aio: Aio, request: int, timeout_us: int, result: Result) -> int: ...
    def aio_reap(self, aio: Aio, results: Results, most: int, count: Count) -> int: ...
    def aio_ended_count(self, aio: Aio) -> int: ...
    def aio_wait_ended(self, aio: Aio, count: int, timeout_us: int) -> int: ...
    def aio_memory_map(self, nbytes: int, pages: int, out: Memory) -> int: ...
    def aio_memory_unmap(self, memory: Memory) -> int: ...
    def aio_has_uring(self) -> int: ...

ffi: Ffi
lib: Lib
