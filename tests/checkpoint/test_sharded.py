"""Checkpoints that are directories: what is in them, several ranks, damage, and what is refused."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_smddp._compat.torch_steps import default_group
from lightning_smddp.checkpoint import sharded
from lightning_smddp.checkpoint.files import CheckpointError
from lightning_smddp.cli import main
from tests.checkpoint.models import Malicious, assert_equal, example, flip
from tests.ranks import run_ranks

NAMES = [{0: "weight", 1: "bias"}]


def save(path: Path, step: int = 1) -> dict[str, Any]:
    checkpoint = example(step)
    sharded.save(checkpoint, path, NAMES)
    return checkpoint


# ---- what it is ----


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    expected = save(tmp_path / "a.ckpt")
    assert_equal(sharded.load(tmp_path / "a.ckpt"), expected)
    assert sharded.is_sharded(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert not sharded.is_sharded("memory://bucket/a.ckpt")
    with pytest.raises(ValueError, match="a file system that all nodes share"):
        save("memory://bucket/a.ckpt")  # type: ignore[arg-type]


def test_tensors_are_read_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = save(tmp_path / "a.ckpt")
    loads: list[Any] = []
    usual = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: loads.append(args) or usual(*args, **options))
    loaded = sharded.load(tmp_path / "a.ckpt")
    assert len(loads) == 1, "the rest"
    state = loaded["state_dict"]
    shapes = state.read(["weight", "scalar"], "meta")
    assert [tuple(tensor.shape) for tensor in shapes.values()] == [(20, 30), ()]
    assert len(loads) == 1
    both = state.read(["weight", "tied"])
    assert both["weight"] is both["tied"]
    assert_equal(both["weight"], expected["state_dict"]["weight"])
    assert len(loads) == 2


def test_what_has_no_values_cannot_be_saved(tmp_path: Path) -> None:
    checkpoint = example()
    checkpoint["state_dict"]["new"] = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match="new has no values yet"):
        sharded.save(checkpoint, tmp_path / "a.ckpt", NAMES)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("before", ["link", "killed"])
def test_replaces(before: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(tmp_path / "other.ckpt")
    if before == "link":
        path.symlink_to("other.ckpt")
    else:  # between two renames
        (tmp_path / "other.ckpt").rename(tmp_path / "last.ckpt.old")
        assert sharded.is_sharded(path)
        assert_equal(sharded.load(path), example())
    save(path, 2)
    assert_equal(sharded.load(path), example(2))
    assert not path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt"] + ["other.ckpt"] * (before == "link")


# ---- damage ----


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage"),
    [("__0_0.distcp", cut), ("__0_0.distcp", os.unlink), (".metadata", cut), ("trainer.pt", flip)],
)
def test_damage_is_found(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    damage(tmp_path / "a.ckpt" / name)
    for act in (sharded.load, sharded.verify):
        with pytest.raises(CheckpointError, match=name):
            act(tmp_path / "a.ckpt")


def test_other_directories(tmp_path: Path) -> None:
    (tmp_path / "b.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="not a complete sharded checkpoint: it has no .metadata"):
        sharded.load(tmp_path / "b.ckpt")
    with pytest.raises(FileNotFoundError, match=r"c\.ckpt"):
        sharded.load(tmp_path / "c.ckpt")


# ---- malice ----


def change_metadata(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))


@pytest.mark.parametrize("inside", [False, True])
def test_malicious_metadata_is_refused(inside: bool, tmp_path: Path) -> None:
    path, payload = tmp_path / "a.ckpt" / ".metadata", Malicious(tmp_path / "marker")
    save(tmp_path / "a.ckpt")
    change_metadata(path, lambda metadata: replace(metadata, planner_data=payload) if inside else payload)
    with pytest.raises(CheckpointError, match="posix.system is not plain data; nothing of it was run"):
        sharded.load(tmp_path / "a.ckpt")
    assert not payload.marker.exists()
    pickle.loads(path.read_bytes())  # else this test could not fail
    assert payload.marker.exists()


def test_entries_that_are_pickles_are_refused(tmp_path: Path) -> None:
    """torch unpickles them, whatever they are."""
    save(tmp_path / "a.ckpt")
    pickled = {"state_dict.weight": BytesStorageMetadata()}
    change_metadata(tmp_path / "a.ckpt" / ".metadata", lambda data: replace(data, state_dict_metadata=pickled))
    with pytest.raises(CheckpointError, match=r"state_dict.weight is a pickle.*it was not read"):
        sharded.load(tmp_path / "a.ckpt")["state_dict"]["weight"]


# ---- several ranks ----


def part_of(rank: int) -> dict[str, Any] | None:
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
    return None if rank == 2 else {**whole, "state_dict": {name: state[name] for name in keep}}


class Failing(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise OSError(errno.EIO, "bad disk")


def full(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_together(directory: str) -> list[str]:
    """What is said when rank 1 fails, before the tensors are written and while they are."""
    rank, path = dist.get_rank(), f"{directory}/a.ckpt"
    everyone = dist.group.WORLD
    replicas = [dist.new_group([member]) for member in range(2)]
    with default_group(replicas[rank]):  # as in another thread that is in a pipeline's step
        sharded.save(part_of(rank), path, NAMES, everyone, order=list(example()["state_dict"]))
    with pytest.raises(OSError, match="could not save") as bad_disk:
        sharded.save({"state_dict": Failing() if rank == 1 else {"x": torch.ones(2)}}, path)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", full)
        with pytest.raises(OSError, match="could not save") as no_space:
            sharded.save(part_of(rank), path, NAMES)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    divided = distribute_tensor(torch.arange(21.0).reshape(7, 3), mesh, [Shard(0)])
    sharded.save({"state_dict": {"divided": divided}}, f"{directory}/b.ckpt")
    return [str(bad_disk.value), str(no_space.value)]


@pytest.mark.slow
def test_ranks_save_one_checkpoint_or_fail_together(tmp_path: Path) -> None:
    results = run_ranks(save_together, 2, str(tmp_path))
    loaded = sharded.load(tmp_path / "a.ckpt")
    assert_equal(loaded, example())
    assert (tmp_path / "a.ckpt" / "__1_0.distcp").stat().st_size < 20_000, "the tied weight is written once"
    for bad_disk, no_space in results:
        assert bad_disk.startswith("[Errno 5] bad disk: could not save a checkpoint")
        assert no_space.startswith("[Errno 28] No space left on device: could not save a checkpoint")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]
    assert_equal(sharded.load(tmp_path / "b.ckpt")["state_dict"]["divided"], torch.arange(21.0).reshape(7, 3))


# ---- conversion ----


def test_to_one_file(tmp_path: Path) -> None:
    expected = save(tmp_path / "a.ckpt")
    assert main(["consolidate", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]) == 0
    loaded = torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert_equal(loaded, expected)
    assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["weight"].data_ptr()


def test_a_conversion_says_what_is_wrong(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "bare.pt")
    for source, message in [("bare.pt", "not a complete sharded checkpoint"), ("not there", "not found")]:
        with pytest.raises((ValueError, OSError), match=message):
            main(["consolidate", str(tmp_path / source), str(tmp_path / "out")])
    assert os.listdir(tmp_path) == ["bare.pt"]
