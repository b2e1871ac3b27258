"""Checkpoints that are directories: what is in them, what they survive, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorProperties

from lightning_smddp.checkpoint import files, tensor_files
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.files import previous_name, remove_directory
from lightning_smddp.checkpoint.newest import newest_checkpoint
from lightning_smddp.checkpoint.ranks import Ranks
from lightning_smddp.checkpoint.safe_metadata import read_metadata
from lightning_smddp.checkpoint.sharded import (
    consolidate,
    is_sharded,
    load_sharded,
    save_sharded,
    shard,
    sharded_saved_ns,
)
from lightning_smddp.checkpoint.temporary import temporary_name
from lightning_smddp.checkpoint.tensor_files import BareTensors
from lightning_smddp.cli import main
from lightning_smddp.wire.pytree import copied
from tests.checkpoint.models import assert_equal
from tests.programs import run_program
from tests.ranks import run_in_threads, run_ranks

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = [{0: "weight", 1: "bias"}]
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.float8_e5m2]


def example(step: int = 1) -> dict[str, Any]:
    """What a Trainer saves, with every kind of tensor."""
    weight = torch.arange(600.0).view(20, 30) + step
    kinds = {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES}
    adam = {"step": torch.tensor(3.0), "exp_avg": weight / 2, "exp_avg_sq": weight / 3}
    other = {"list": [1, torch.ones(2), (2.5, None)], "dict": {"text": "a", 7: torch.zeros(3)}}
    return {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {
            "weight": weight,
            "tied": weight,
            **kinds,
            "module._extra_state": {"any": "thing"},
            "transposed": weight.t(),
            "part": weight[2:4, 3:5],
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(5),
            "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
            "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
            "sparse": torch.eye(3).to_sparse(),
            "bias": nn.Parameter(torch.full((3,), float(step))),
        },
        "loops": {"fit_loop": {"state": [1, 2]}},
        "callbacks": {"ema": {"values": torch.ones(3)}},
        "optimizer_states": [
            {
                "state": {0: adam, 1: other, "not a parameter": 1},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}, {"lr": 0.2, "params": [1]}],
            }
        ],
        "lr_schedulers": [],
    }


def plain(value: Any) -> Any:
    """For comparisons: parameters as tensors, sparse tensors as dense ones."""
    if isinstance(value, Tensor):
        return value.detach().to_dense() if value.is_sparse else value.detach()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(plain(item) for item in value) if type(value) in (list, tuple) else value


def assert_same(actual: Any, expected: Any) -> None:
    """Bit for bit, inside of lists too."""
    actual, expected = plain(actual), plain(expected)
    if isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    else:
        assert_equal(actual, expected)


def save(path: Path, step: int = 1, **options: Any) -> dict[str, Any]:
    checkpoint = example(step)
    save_sharded(checkpoint, path, NAMES, list(checkpoint["state_dict"]), **options)
    return checkpoint


def step_of(path: Path) -> int:
    loaded = load_sharded(path)
    assert_same(loaded, example(loaded["global_step"]))
    return int(loaded["global_step"])


# ---- what it is ----


@pytest.mark.parametrize("files", [1, 3])
def test_reads_what_it_wrote(files: int, tmp_path: Path) -> None:
    expected = save(tmp_path / "a.ckpt", files=files)
    loaded = load_sharded(tmp_path / "a.ckpt")
    assert_same(loaded, expected)
    state = loaded["state_dict"]
    assert state["tied"].data_ptr() == state["weight"].data_ptr()
    assert all(t.data_ptr() % 8 == 0 for t in state.values() if isinstance(t, Tensor) and not t.is_sparse)
    parts = [name for name in os.listdir(tmp_path / "a.ckpt") if name.endswith(".distcp")]
    assert len(parts) == files
    assert is_sharded(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_what_a_torch_with_strides_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.15 puts them behind what 2.13 knows of a tensor."""
    usual = TensorProperties.__getstate__

    def with_strides(properties: TensorProperties) -> Any:
        return (*usual(properties)[:5], (1,))

    monkeypatch.setattr(TensorProperties, "__getstate__", with_strides)
    expected = save(tmp_path / "a.ckpt")
    monkeypatch.undo()
    assert_same(load_sharded(tmp_path / "a.ckpt"), expected)


def test_what_is_loaded_may_be_changed(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    loaded = load_sharded(tmp_path / "a.ckpt")
    kept = copied(loaded["optimizer_states"])
    loaded["state_dict"]["weight"].zero_()
    loaded["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
    assert_same(kept, example()["optimizer_states"])
    assert step_of(tmp_path / "a.ckpt") == 1


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")
def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    expected = save(tmp_path / "a.ckpt", files=2)
    wanted = {
        "state_dict": {"weight": torch.zeros(20, 30)},
        "optimizer_states": {"0": {"weight": {"exp_avg": torch.zeros(20, 30)}}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about reading without a process group
        dcp.load(wanted, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
        dcp_to_torch_save(tmp_path / "a.ckpt", tmp_path / "torchs.pt")
    assert torch.equal(wanted["state_dict"]["weight"], expected["state_dict"]["weight"])
    moments = wanted["optimizer_states"]["0"]["weight"]
    assert torch.equal(moments["exp_avg"], expected["optimizer_states"][0]["state"][0]["exp_avg"])  # type: ignore[index, call-overload]
    torchs = torch.load(tmp_path / "torchs.pt", weights_only=True)
    assert_same(torchs["state_dict"]["transposed"], expected["state_dict"]["transposed"])


def test_the_weights_alone(tmp_path: Path) -> None:
    checkpoint = {key: example()[key] for key in ("epoch", "state_dict")}
    save_sharded(checkpoint, tmp_path / "a.ckpt")
    assert_same(load_sharded(tmp_path / "a.ckpt")["epoch"], 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["state_dict"].update(new=torch.ones(2, device="meta")), "new has no values yet"),
        (lambda c: c["optimizer_states"][0]["state"][0].update(new=object()), "weight.new is a builtins.object"),
    ],
    ids=["meta", "object"],
)
def test_what_cannot_be_saved(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    checkpoint = example()
    change(checkpoint)
    with pytest.raises(ValueError, match=message):
        save_sharded(checkpoint, tmp_path / "a.ckpt", NAMES)
    assert os.listdir(tmp_path) == []


def test_urls_are_refused() -> None:
    with pytest.raises(ValueError, match="on one that all nodes share"):
        save_sharded(example(), "memory://bucket/a.ckpt")
    assert not is_sharded("memory://bucket/a.ckpt")


# ---- taking the place of another ----


@pytest.mark.parametrize("at_once", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("before", ["directory", "file", "link"])
def test_replaces(before: str, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    path = tmp_path / "last.ckpt"
    if before == "directory":
        save(path)
    elif before == "file":
        torch.save({}, path)
    else:
        save(tmp_path / "other.ckpt")
        path.symlink_to("other.ckpt")
    save(path, 2)
    assert step_of(path) == 2
    assert not path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt"] + ["other.ckpt"] * (before == "link")


def test_the_previous_one_is_found_between_two_renames(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path)
    path.rename(previous_name(str(path)))
    assert is_sharded(path)
    assert step_of(path) == 1
    assert newest_checkpoint([tmp_path]) == str(tmp_path / "last.previous.ckpt")
    save(path, 2)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_the_newest_of_files_and_directories(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    save(tmp_path / "b.ckpt", 2)
    (tmp_path / "c.ckpt").mkdir()
    assert newest_checkpoint([tmp_path]) == str(tmp_path / "b.ckpt")
    flip(tmp_path / "b.ckpt" / "__0_0.distcp")
    reports: list[str] = []
    assert newest_checkpoint([tmp_path], reports.append) == str(tmp_path / "a.ckpt")
    assert "__0_0.distcp: state_dict" in reports[0]


def test_removes_what_killed_writers_left(tmp_path: Path) -> None:
    stray, link = tmp_path / temporary_name("a.ckpt"), tmp_path / temporary_name("link")
    stray.mkdir()
    (stray / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "precious").mkdir()
    link.symlink_to("precious")
    half, go_on = threading.Event(), threading.Event()

    def wait(planner: Any, item: Any, tensor: Tensor) -> Tensor:
        half.set()
        assert go_on.wait(20)
        return original(planner, item, tensor)

    original, BareTensors.transform_object = BareTensors.transform_object, wait  # type: ignore[method-assign]
    try:
        writer = threading.Thread(target=save, args=(tmp_path / "a.ckpt",))
        writer.start()
        assert half.wait(20)
    finally:
        BareTensors.transform_object = original  # type: ignore[method-assign]
    save(tmp_path / "b.ckpt", 2)
    assert not stray.exists()
    go_on.set()
    writer.join()
    assert (step_of(tmp_path / "a.ckpt"), step_of(tmp_path / "b.ckpt")) == (1, 2)
    assert sorted(os.listdir(tmp_path)) == sorted([link.name, "a.ckpt", "b.ckpt", "precious"])


def test_removing(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert is_sharded(tmp_path / "last.ckpt")
    for name in ("last.ckpt", "not there.ckpt"):
        remove_directory(str(tmp_path / name))
    assert os.listdir(tmp_path) == ["a.ckpt"]
    remove_directory(str(tmp_path / "a.ckpt"))
    assert os.listdir(tmp_path) == []


# ---- damage ----


def flip(path: Path, place: int | None = None) -> None:
    """One bit, in the middle of a file if not told where."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "trainer.pt"])
@pytest.mark.parametrize(
    ("damage", "message"), [(flip, "damaged|changed"), (cut, "bytes, it was saved with"), (os.unlink, "is missing")]
)
def test_damage_is_found(name: str, damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    damage(tmp_path / "a.ckpt" / name)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_sharded(tmp_path / "a.ckpt")
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp", ".metadata", "trainer.pt"])
def test_a_flipped_bit_is_found_or_changes_nothing(name: str, tmp_path: Path) -> None:
    """Each 61st byte. Zip files have some that nobody reads: dates, rights, what fills the space between values."""
    path = tmp_path / "a.ckpt"
    shutil.copytree(FIXTURES / "sharded_v1.ckpt", path)
    expected, size = load_sharded(path), (path / name).stat().st_size
    found = 0
    for position in range(0, size, 61):
        flip(path / name, position)
        try:
            assert_same(load_sharded(path), expected)
        except CheckpointError as error:
            found += name in str(error)
        flip(path / name, position)
    assert found > size / 61 / 4


def test_a_directory_of_an_earlier_version(tmp_path: Path) -> None:
    """With a SHA-256 for each file, and tensors that were written without torch's planners."""
    path = FIXTURES / "sharded_v1.ckpt"
    assert json.loads((path / "manifest.json").read_text())["version"] == 1
    loaded = load_sharded(path)
    weight = torch.arange(6.0).view(2, 3)
    assert_same(loaded["state_dict"]["weight"], weight)
    assert_same(loaded["state_dict"]["bias"], torch.tensor([1, 2, 3], dtype=torch.bfloat16))
    assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["weight"].data_ptr()
    assert list(loaded["state_dict"]) == ["weight", "tied", "bias", "module._extra_state", "empty"]
    [optimizer] = loaded["optimizer_states"]
    assert_same(optimizer["state"][0], {"step": torch.tensor(3.0), "exp_avg": weight / 2})
    assert newest_checkpoint([FIXTURES]) == str(path)
    save_sharded(loaded, tmp_path / "again.ckpt", NAMES, list(loaded["state_dict"]))
    assert_same(load_sharded(tmp_path / "again.ckpt"), loaded)


def test_without_checksums_only_sizes_are_compared(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    flip(tmp_path / "a.ckpt" / "__0_0.distcp", 2000)  # in the first tensor
    load_sharded(tmp_path / "a.ckpt", verify=False)
    cut(tmp_path / "a.ckpt" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="bytes, it was saved with"):
        load_sharded(tmp_path / "a.ckpt", verify=False)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "x", "version": 1}', '{"files": {"../x": 1}}'], ids=repr
)
def test_a_damaged_manifest(text: str, tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json: is damaged"):
        load_sharded(tmp_path / "a.ckpt")


def test_a_directory_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="without a manifest"):
        load_sharded(tmp_path / "a.ckpt")
    assert sharded_saved_ns(str(tmp_path / "a.ckpt")) is None
    with pytest.raises(FileNotFoundError, match=r"b\.ckpt"):
        load_sharded(tmp_path / "b.ckpt")


# ---- malice ----


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def forge(directory: Path, name: str, contents: bytes) -> None:
    """Replace a file, and what the manifest says about it: a hash is no protection from who can write both."""
    (directory / name).write_bytes(contents)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def forged_metadata(directory: Path, change: Callable[[Metadata], Any]) -> bytes:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    changed = change(metadata) or metadata
    return changed if isinstance(changed, bytes) else pickle.dumps(changed)


def set_place(metadata: Metadata, **values: Any) -> None:
    for place in metadata.storage_data.values():
        vars(place).update(values)


_DCP = b"ctorch.distributed.checkpoint.metadata\n"
# Sets Metadata.__init__ to MetadataIndex, by names that a directory may have.
CHANGES_A_CLASS = b"\x80\x02" + _DCP + b"Metadata\nN}X\x08\x00\x00\x00__init__" + _DCP + b"MetadataIndex\ns\x86b."
FORGERIES: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "instead": (lambda metadata, marker: Payload(marker), r"contains `posix.mkdir`.*; nothing of it was run"),
    "inside": (lambda metadata, marker: setattr(metadata, "planner_data", Payload(marker)), "contains `posix.mkdir`"),
    "a class": (lambda metadata, marker: subprocess.Popen, r"contains `subprocess.Popen`"),
    "bytes": (
        lambda metadata, marker: metadata.state_dict_metadata.update(weight=BytesStorageMetadata()),
        "'weight' as a pickle of its own",
    ),
    "elsewhere": (lambda metadata, marker: set_place(metadata, relative_path="../x"), "not in this directory"),
    "outside": (lambda metadata, marker: set_place(metadata, offset=10**9), "not at its place"),
    "before": (lambda metadata, marker: set_place(metadata, offset=-64), "not at its place"),
    "no object": (lambda metadata, marker: [1, 2], "contains a list"),
    "a change of torch": (lambda metadata, marker: CHANGES_A_CLASS, "changes a type"),
}


UNCHANGED = Metadata.__init__


@pytest.mark.parametrize("forgery", FORGERIES)
def test_malicious_metadata_is_refused(forgery: str, tmp_path: Path) -> None:
    change, message = FORGERIES[forgery]
    path, marker = tmp_path / "a.ckpt", tmp_path / "marker"
    save(path)
    forge(path, ".metadata", forged_metadata(path, lambda metadata: change(metadata, marker)))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_sharded(path)
    assert "weights_only" not in str(caught.value)
    assert not marker.exists()
    assert Metadata.__init__ is UNCHANGED


def test_the_payload_would_have_run(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    path, marker = tmp_path / "a.ckpt", tmp_path / "marker"
    save(path)
    forge(path, ".metadata", forged_metadata(path, lambda metadata: Payload(marker)))
    with suppress(CheckpointException), warnings.catch_warnings():  # there is no metadata, only the payload
        warnings.simplefilter("ignore")
        dcp.load({"x": torch.zeros(1)}, checkpoint_id=path, no_dist=True)
    assert marker.exists()


@pytest.mark.parametrize("contents", [b"", b"\x80", b"text", pickle.dumps(Metadata({"a": 1}))], ids=len)  # type: ignore[dict-item]
def test_damaged_metadata_with_the_right_hash(contents: bytes, tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    forge(tmp_path / "a.ckpt", ".metadata", contents)
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        load_sharded(tmp_path / "a.ckpt")


def test_code_in_the_rest_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    save_sharded({**example(), "extra": Payload(marker)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"contains `(posix|nt).mkdir`"):
        load_sharded(tmp_path / "a.ckpt")
    assert not marker.exists()


# ---- several ranks ----


def part_of(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 hold half of the model each, and both the tied weight; rank 2 nothing."""
    whole = example()
    state, adam = whole["state_dict"], whole["optimizer_states"][0]["state"]
    if rank == 0:
        keep: Any = [name for name in state if name not in ("bias", "scalar")]
        adam.pop(1)
    else:
        keep = ["weight", "bias", "scalar"]
        adam.pop("not a parameter")
        whole["epoch"] = "not the first rank's"
    return {**whole, "state_dict": {name: state[name] for name in keep}}


def save_together(group: dist.ProcessGroup, path: str) -> Any:
    ranks = Ranks(group)
    checkpoint = None if ranks.rank == 2 else part_of(ranks.rank)
    save_sharded(checkpoint, path, NAMES, list(example()["state_dict"]), ranks)
    return load_sharded(path, ranks)


def test_parts_of_ranks_become_one_checkpoint(tmp_path: Path) -> None:
    for loaded in run_in_threads(save_together, 3, str(tmp_path / "a.ckpt")):
        assert_same(loaded, example())
    distributed = {name for name in os.listdir(tmp_path / "a.ckpt") if name.endswith(".distcp")}
    assert distributed == {"__0_0.distcp", "__1_0.distcp"}
    assert (tmp_path / "a.ckpt" / "__1_0.distcp").stat().st_size < 10_000, "the tied weight is written once"


def fail_on_one(group: dist.ProcessGroup, path: str, kind: str) -> Any:
    """Rank 1 fails in the middle; returns each rank's error."""

    class Failing(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            if kind == "OSError":
                raise OSError(errno.ENOSPC, "No space left on device")
            raise KeyError("bug")

    ranks = Ranks(group)
    state = part_of(ranks.rank)["state_dict"]
    checkpoint = {"state_dict": Failing(state) if ranks.rank == 1 else state}
    try:
        save_sharded(checkpoint, path, ranks=ranks)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "filename", None)


@pytest.mark.parametrize("kind", ["OSError", "bug"])
def test_an_error_of_one_rank_is_raised_on_all(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path)
    found = run_in_threads(fail_on_one, 2, str(path), kind)
    if kind == "OSError":
        assert all(text.startswith("[Errno 28] No space left on device") for _, text, _ in found)
    else:
        assert [kind for kind, _, _ in found] == ["RankFailedError", "KeyError"]
        assert "Rank 1 failed: KeyError" in found[0][1]
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert step_of(path) == 1


def load_damaged(group: dist.ProcessGroup, path: str) -> Any:
    try:
        load_sharded(path, Ranks(group))
    except CheckpointError as error:
        return str(error)


def tensors_that_are_verified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Their files, and where in these: grows."""
    read: list[tuple[str, int]] = []

    class Noting(tensor_files.MappedFile):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            self.path, self.verifies = path, False

        def __enter__(self) -> Any:  # as loading does not, which keeps files open
            self.verifies = True
            return self

        def part(self, stored: Any) -> Any:
            if self.verifies:
                read.append((self.path, stored.offset))
            return super().part(stored)

    monkeypatch.setattr(tensor_files, "MappedFile", Noting)
    return read


def test_ranks_share_the_work_of_verifying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.ckpt", files=3)
    read = tensors_that_are_verified(monkeypatch)
    load_twice = run_in_threads(load_damaged, 2, str(tmp_path / "a.ckpt"))
    assert load_twice == [None, None]
    assert len(read) == len(set(read)) == len(read_metadata(str(tmp_path / "a.ckpt")).storage_data)
    flip(tmp_path / "a.ckpt" / "__0_1.distcp")
    found = run_in_threads(load_damaged, 2, str(tmp_path / "a.ckpt"))
    assert "__0_1.distcp: state_dict" in found[0]
    assert found[0] == found[1]


def find_newest(group: dist.ProcessGroup, path: str) -> Any:
    lines: list[str] = []
    return newest_checkpoint([path], lines.append, Ranks(group)), lines


def test_ranks_look_for_the_newest_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor of a directory is read by one of them."""
    for step, name in enumerate("abc"):
        save(tmp_path / f"{name}.ckpt", step, files=3)
    flip(tmp_path / "c.ckpt" / "__0_1.distcp")
    torch.save({}, tmp_path / "d.ckpt")
    cut(tmp_path / "d.ckpt")
    read = tensors_that_are_verified(monkeypatch)
    (first, lines), (second, silence) = run_in_threads(find_newest, 2, str(tmp_path))
    assert first == second == str(tmp_path / "b.ckpt")
    assert len(lines) == 2
    assert silence == []
    of_b = [(path, begin) for path, begin in read if "b.ckpt" in path]
    assert len(of_b) == len(set(of_b)) == len(read_metadata(first).storage_data)


def test_what_is_verified_is_not_verified_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.ckpt")
    monkeypatch.setattr(tensor_files, "require_whole", None)
    assert_same(load_sharded(tmp_path / "a.ckpt", verify=False), example())


# ---- failures of the file system ----


def test_what_is_read_back_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    save(path)
    fsync = os.fsync

    def sync_and_damage(descriptor: int) -> None:
        fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            os.pwrite(descriptor, b"?", 2001)  # in the first tensor

    monkeypatch.setattr(os, "fsync", sync_and_damage)
    with pytest.raises(OSError, match="differs from what was written.*could not save") as caught:
        save(path, 2)
    assert caught.value.filename == str(path)
    monkeypatch.undo()
    assert step_of(path) == 1
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_too_large_for_the_file_system(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    huge = torch.ones(1).expand(10**15)
    with pytest.raises(OSError, match="No space left.*which needs [0-9]{16} bytes"):
        save_sharded({"state_dict": {"huge": huge}}, tmp_path / "a.ckpt")
    assert step_of(tmp_path / "a.ckpt") == 1


# ---- kills ----


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """Where nobody waits for a disk."""
    path = Path(tempfile.mkdtemp(prefix=f"tests-{os.getpid()}-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "every"),
    [
        ("exchange", 8),
        pytest.param("exchange", 1, marks=pytest.mark.exhaustive),
        pytest.param("renames", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_killed_before_and_after_every_call(way: str, every: int, memory_directory: Path, tmp_path: Path) -> None:
    command = ["-m", "tests.checkpoint.killed_sharded", way, str(every), str(memory_directory)]
    result = run_program(command, tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["lost"] == 0
    assert found["kills"] > 100
    assert found["old"] > 50 / every
    assert found["new"] > 20 / every


# ---- conversion ----


def test_to_one_file_and_back(tmp_path: Path) -> None:
    expected = save(tmp_path / "a.ckpt", files=2)
    assert main(["consolidate", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]) == 0
    loaded = torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert_same(loaded, expected)
    assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["weight"].data_ptr()
    assert main(["shard", str(tmp_path / "b.ckpt"), str(tmp_path / "c.ckpt"), "--parts", "3"]) == 0
    assert_same(load_sharded(tmp_path / "c.ckpt"), expected)
    assert len(list((tmp_path / "c.ckpt").glob("*.distcp"))) == 3


def test_conversions_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "bare.pt")
    for arguments, message in [
        (["shard", "bare.pt", "out"], "was not saved by a Trainer"),
        (["shard", "not there", "out"], "not found"),
        (["shard", "bare.pt", "out", "--parts", "0"], "at least 1"),
        (["consolidate", "bare.pt", "out"], "is one plain file, not a sharded checkpoint"),
        (["consolidate", "not there", "out"], "not found"),
    ]:
        paths = [str(tmp_path / argument) if index in (1, 2) else argument for index, argument in enumerate(arguments)]
        assert main(paths) == 1
        assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["bare.pt"]


def anonymous_memory() -> int:
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def convert_and_measure(directory: str, megabytes: int) -> list[int]:
    """By how much memory grows meanwhile, at most: for saving, for ``consolidate``, for ``shard`` and for loading."""
    torch.set_num_threads(1)
    state = {f"layer {index}": torch.full((2**18,), float(index)) for index in range(megabytes)}
    a, b, c = (os.path.join(directory, name) for name in "abc")
    save_first: Any = lambda: save_sharded({"state_dict": state}, a)  # noqa: E731
    actions = [save_first, lambda: consolidate(a, b), lambda: shard(b, c, 4), lambda: load_sharded(c)]
    growth = []
    for act in actions:
        before, most, done = anonymous_memory(), 0, threading.Event()

        def watch(done: threading.Event = done) -> None:
            nonlocal most
            while not done.wait(0.002):
                most = max(most, anonymous_memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        act()
        done.set()
        watcher.join()
        growth.append(max(most, anonymous_memory()) - before)
        state.clear()
    return growth


@pytest.mark.slow
def test_nothing_is_in_memory_as_a_whole(tmp_path: Path) -> None:
    megabytes = 64
    [growth] = run_ranks(convert_and_measure, 1, str(tmp_path), megabytes, init=False)
    assert all(grown < megabytes / 3 * 2**20 for grown in growth), [grown / 2**20 for grown in growth]
