"""Who says to keep a contract of the store defines all of its methods, whoever makes it."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

from kvshelf.corpus.run.journal import FileLines, Lines, ObjectLines
from kvshelf.corpus.run.stored import TableLines
from kvshelf.store.base import Store
from kvshelf.store.blobs import Blobs, Leases
from kvshelf.store.disk.folder import Folder
from kvshelf.store.disk.index import SqliteIndex
from kvshelf.store.disk.jobs import SqliteJobs
from kvshelf.store.disk.leases import SqliteLeases
from kvshelf.store.index import Index
from kvshelf.store.objects.blobs import ObjectBlobs
from kvshelf.store.redis.blobs import RedisBlobs
from kvshelf.store.redis.index import RedisIndex
from kvshelf.store.redis.jobs import RedisJobs
from kvshelf.store.redis.leases import RedisLeases
from kvshelf.store.shelf import Shelf
from kvshelf.store.table import JobTable
from kvshelf.store.tiers.disk import DiskTier
from kvshelf.store.tiers.ram import RamTier
from kvshelf.store.tiers.tiered import TieredStore
from kvshelf.store.tiers.tiers import Tier


def promised(contract: type) -> set[str]:
    """The methods of a contract that have no body but their docstring."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(contract))).body
    assert isinstance(node, ast.ClassDef)
    methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
    return {method.name for method in methods if len(method.body) == 1 and ast.get_docstring(method)}


@pytest.mark.parametrize(
    ("contract", "keepers"),
    [
        (Store, (Shelf, TieredStore)),
        (Index, (SqliteIndex, RedisIndex)),
        (Blobs, (Folder, RedisBlobs, ObjectBlobs)),
        (Leases, (SqliteLeases, RedisLeases)),
        (JobTable, (SqliteJobs, RedisJobs)),
        (Tier, (RamTier, DiskTier)),
        (Lines, (FileLines, ObjectLines, TableLines)),
    ],
)
def test_every_method_of_a_contract_is_defined(contract: type, keepers: tuple[type, ...]) -> None:
    methods = promised(contract)
    assert methods
    for keeper in keepers:
        lacking = {name for name in methods if getattr(keeper, name) is getattr(contract, name)}
        assert not lacking, (keeper, lacking)
