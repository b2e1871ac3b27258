"""What stands in for ``torch.cuda``: what this package, Lightning and torch call of it, on the simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_device: ModuleType  # the compiled device, once it is installed
_cpu_resize = torch.UntypedStorage.resize_


class Stream(torch.Stream):
    """As ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        if ids:
            return super().__new__(cls, device_type=1, **ids)  # 1: c10::DeviceType::CUDA
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event:
    """As ``torch.cuda.Event``; torch's functions take no subclasses of ``torch.Event``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event("cuda", enable_timing=enable_timing, blocking=blocking)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _device.current_device() if index is None else index


def _stream(stream_id: int, device: Any) -> Stream:
    return Stream(stream_id=stream_id, device_index=_index(device))


def current_stream(device: Any = None) -> Stream:
    return _stream(_device.current_stream(), device)


def default_stream(device: Any = None) -> Stream:
    return _stream(0, device)


def set_stream(chosen: Stream) -> None:
    _device.exchange_stream(chosen.stream_id)


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    before = _device.exchange_stream(chosen.stream_id)
    try:
        yield
    finally:
        _device.exchange_stream(before)


class device(contextlib.ContextDecorator):  # noqa: N801 (torch's name)
    """As ``torch.cuda.device``."""

    def __init__(self, chosen: Any) -> None:
        self.chosen, self.before = _index(chosen), -1

    def __enter__(self) -> None:
        self.before = _device.exchange_device(self.chosen)

    def __exit__(self, *error: object) -> None:
        _device.exchange_device(self.before)


def set_device(chosen: Any) -> None:
    _device.exchange_device(_index(chosen))


def synchronize(device: Any = None) -> None:
    _device.synchronised("synchronize")
    _device.synchronise_device()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _device.capacity() - _device.allocated(_index(device)), _device.capacity()


def memory_stats(device: Any = None) -> dict[str, int]:
    now, peak = _device.allocated(_index(device)), _device.peak(_index(device))
    return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}


def get_device_properties(device: Any = None) -> Any:
    return SimpleNamespace(
        name="simulated", major=9, minor=0, total_memory=_device.capacity(), multi_processor_count=132
    )


def _storage_to(storage: torch.UntypedStorage, device: torch.device, non_blocking: bool = False) -> Any:
    """``UntypedStorage.to``; that of a CPU build knows no storages elsewhere."""
    if storage.device == device:
        return storage
    return _copied(storage, device, non_blocking)


def _storage_clone(storage: torch.UntypedStorage) -> Any:
    """``UntypedStorage.clone``, with which tensors are deep-copied."""
    return _copied(storage, storage.device)


def _storage_resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """``UntypedStorage.resize_``, with which FSDP frees parameters and gets memory for them again."""
    if storage.device.type != "cuda":
        return _cpu_resize(storage, size)
    _device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
    return storage


def _copied(storage: torch.UntypedStorage, device: torch.device, non_blocking: bool = False) -> Any:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    return copy.copy_(storage, non_blocking)


def install(module: ModuleType, devices: int) -> None:
    """Put these functions where CUDA's are."""
    global _device
    _device = module
    cuda = torch.cuda
    replacements = {
        **{f.__name__: f for f in (Stream, Event, current_stream, default_stream, set_stream, stream, device)},
        **{f.__name__: f for f in (set_device, synchronize, mem_get_info, memory_stats, get_device_properties)},
        "default_generators": tuple(module.default_generator(index) for index in range(devices)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "_initialized": True,
        "device_count": lambda: devices,
        "current_device": module.current_device,
        "_exchange_device": module.exchange_device,
        "_maybe_exchange_device": module.exchange_device,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: module.allocated(_index(device)),
        "max_memory_allocated": lambda device=None: module.peak(_index(device)),
        "memory_reserved": lambda device=None: module.allocated(_index(device)),
        "max_memory_reserved": lambda device=None: module.peak(_index(device)),
        "reset_peak_memory_stats": lambda device=None: module.reset_peak(_index(device)),
    }
    for name, value in replacements.items():
        setattr(cuda, name, value)
    torch.storage._to = _storage_to
    torch.UntypedStorage.clone = _storage_clone  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _storage_resize  # type: ignore[method-assign]
    torch.cuda.nccl.version = lambda: (2, 27, 0)  # type: ignore[assignment]
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.is_built = lambda: True  # type: ignore[assignment]
    torch._C._cuda_getDevice = module.current_device  # type: ignore[attr-defined]
    torch._C._cuda_getDeviceCount = lambda: devices  # type: ignore[attr-defined]
