"""The radix tree: finding, locking, and the order of eviction."""

from __future__ import annotations

import pytest

from aioengine.memory.radix import Node, RadixTree


def grow(tree: RadixTree, token_ids: list[int], first_page: int) -> list[Node]:
    """Add the missing nodes of ``token_ids`` and return the complete path, unlocked."""
    path: list[Node] = []
    parent = tree.root
    for index, key in enumerate(tree.keys(token_ids)):
        node = parent.children.get(key)
        if node is None:
            node = tree.add(parent, key, first_page + index)
        else:
            tree.lock([node])
        path.append(node)
        parent = node
    tree.unlock(path)
    return path


def evict_all(tree: RadixTree) -> list[int]:
    pages: list[int] = []
    while (node := tree.evict()) is not None:
        pages.append(node.page)
    return pages


def test_keys_are_the_tokens_of_full_pages() -> None:
    tree = RadixTree(2)
    assert list(tree.keys([1, 2, 3, 4, 5])) == [(1, 2), (3, 4)]
    assert list(tree.keys([1, 2, 3, 4, 5, 6], 1)) == [(3, 4), (5, 6)]
    assert list(tree.keys([1])) == []


def test_walk_finds_the_longest_known_prefix() -> None:
    tree = RadixTree(2)
    grow(tree, [1, 2, 3, 4], 0)
    grow(tree, [1, 2, 9, 9], 10)
    assert [node.page for node in tree.walk([1, 2, 3, 4, 5], 9)] == [0, 1]
    assert [node.page for node in tree.walk([1, 2, 9, 9], 9)] == [0, 11]
    assert [node.page for node in tree.walk([1, 2, 3, 4], 1)] == [0]
    assert tree.walk([1, 2], 0) == []
    assert tree.walk([2, 1], 9) == []


def test_the_leaf_unlocked_longest_ago_is_evicted_first() -> None:
    tree = RadixTree(1)
    grow(tree, [1, 2, 3], 0)
    grow(tree, [1, 7], 10)
    assert evict_all(tree) == [2, 1, 11, 0]
    assert tree.num_nodes == 0


def test_unlocking_a_path_moves_it_to_the_end_of_the_eviction_order() -> None:
    tree = RadixTree(1)
    first = grow(tree, [1, 2], 0)
    grow(tree, [5, 6], 10)
    tree.lock(first)
    tree.unlock(first)
    assert evict_all(tree) == [11, 10, 1, 0]


def test_locked_pages_are_not_evicted() -> None:
    tree = RadixTree(1)
    path = grow(tree, [1, 2, 3], 0)
    tree.lock(path[:2])
    assert len(tree.unlocked) == 1
    assert evict_all(tree) == [2]
    tree.lock(path[:2])
    tree.unlock(path[:2])
    assert tree.evict() is None
    tree.unlock(path[:2])
    assert evict_all(tree) == [1, 0]


def test_a_removed_node_is_no_longer_pending() -> None:
    tree = RadixTree(1)
    node = tree.add(tree.root, (1,), 0)
    node.is_pending = True
    tree.remove(node)
    assert not node.is_pending
    assert tree.walk([1], 1) == []
    assert tree.num_nodes == 0


def test_only_leaves_are_removed() -> None:
    tree = RadixTree(1)
    parent = tree.add(tree.root, (1,), 0)
    tree.add(parent, (2,), 1)
    with pytest.raises(ValueError, match="not a leaf"):
        tree.remove(parent)


def test_a_hundred_thousand_pages_are_evicted_one_by_one() -> None:
    """If each eviction searched the tree, this would exceed the time limit of a test."""
    tree = RadixTree(1)
    for number in range(1000):
        grow(tree, [number, *range(99)], number * 100)
    assert len(tree.unlocked) == 100_000
    assert len(evict_all(tree)) == 100_000


def test_only_pages_that_are_not_in_the_tree_can_be_announced() -> None:
    tree = RadixTree(1)
    first = tree.add_pending(tree.root, [(1,), (2,), (3,)], [10, 11, 12])
    assert [(node.key, node.page, node.num_locks, node.is_pending) for node in first] == [
        ((1,), 10, 1, True),
        ((2,), 11, 1, True),
        ((3,), 12, 1, True),
    ]
    assert tree.add_pending(first[0], [(9,), (3,)], [20, 21]) != []
    assert tree.add_pending(first[0], [(2,), (4,)], [30, 31]) == []
    assert tree.add_pending(first[1], [(4,), (5,)], [40, 41])[-1].parent is tree.walk([1, 2, 4, 5], 4)[2]
    assert tree.num_nodes == 7
    assert [node.page for node in tree.walk([1, 2, 3], 3)] == [10, 11, 12]
