"""One copy of the parameters for a node: each rank may write to it as if it had its own."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from lightning_smddp.communication.shared_segments import create_file
from lightning_smddp.sharding import node_memory
from lightning_smddp.sharding.node_memory import NodeMemory, page_ranges, unsupported

PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))


@pytest.fixture
def two():
    """Two ranks' mappings of one file of four pages; in one process they are as good as in two."""
    descriptor = create_file(4 * PAGE)
    memories = NodeMemory(descriptor), NodeMemory(descriptor)
    os.close(descriptor)
    return memories


def test_what_is_written_to_the_shared_mapping_is_seen_by_all_ranks(two):
    one, other = two
    int(other.own.sum())
    one.shared[5] = 7
    assert other.own[5] == 7
    assert other.written_pages().tolist() == []


def test_what_a_rank_writes_to_its_own_mapping_is_its_own(two):
    one, other = two
    one.own[PAGE + 3] = 9
    assert other.own[PAGE + 3] == 0
    assert other.shared[PAGE + 3] == 0
    assert one.written_pages().tolist() == [1]
    assert other.written_pages().tolist() == []


def test_a_written_page_does_not_follow_the_file_until_it_is_dropped(two):
    one, other = two
    one.own[0] = 1
    other.shared[1] = 2
    assert one.own[1] == 0
    one.drop(one.written_pages())
    assert one.own[:2].tolist() == [0, 2]
    assert one.written_pages().tolist() == []


def test_a_rank_publishes_its_range_alone(two):
    one, other = two
    one.own[:] = 1
    one.publish(one.written_pages(), PAGE + 10, 2 * PAGE + 1)
    assert other.own.nonzero().view(-1).tolist() == list(range(PAGE + 10, 2 * PAGE + 1))


def test_pages_that_were_written_with_what_was_there_are_told_apart(two):
    one, _ = two
    one.own[0] = 0
    one.own[3 * PAGE] = 5
    assert one.written_pages().tolist() == [0, 3]
    assert one.differing(one.written_pages()).tolist() == [3]


def test_views_have_storages_of_their_own_size(two):
    view = two[0].view(torch.float32, 8, 10)
    assert view.untyped_storage().nbytes() == 40
    view.fill_(1.0)
    assert two[0].own[8:48].view(torch.float32).tolist() == [1.0] * 10


def test_page_ranges_join_neighbours():
    assert page_ranges(torch.tensor([3, 4, 7])) == [(3 * PAGE, 5 * PAGE), (7 * PAGE, 8 * PAGE)]
    assert page_ranges(torch.tensor([], dtype=torch.int64)) == []


def test_a_system_whose_page_table_does_not_tell_is_not_used(monkeypatch):
    monkeypatch.setattr(NodeMemory, "written_pages", lambda self: torch.tensor([], dtype=torch.int64))
    assert "which pages" in str(unsupported())


def test_without_memory_the_reason_is_told(monkeypatch):
    def full(size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_memory, "create_file", full)
    assert "No space left" in str(unsupported())
