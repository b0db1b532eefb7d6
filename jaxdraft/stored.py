"""What an orbax directory holds here: named trees of arrays and named JSON documents.

It appears complete or not at all, and is read on the host: arrays come back as NumPy's, bit for bit
as they were written, whatever devices or global options of jax there are. Digests of
all stand beside them, because orbax keeps none of the values: a flipped bit would go unseen.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

DIGESTS = "digests"


def write(directory: Path, trees: Mapping[str, Any], documents: Mapping[str, Any]) -> None:
    """Write a directory; it appears complete or not at all.

    Args:
        directory: path that does not exist yet.
        trees: trees of arrays (NumPy's or jax's) by name.
        documents: JSON values by name.

    Raises:
        ValueError: the directory exists.

    Source: contracts §3.
    """
    directory = directory.absolute()
    if directory.exists():
        raise ValueError(
            f"{directory}: expected a path that does not exist, found one that does; checkpoints "
            "are never overwritten, choose another name"
        )
    digests = {name: digest(tree) for name, tree in trees.items()}
    digests |= {name: _document_digest(content) for name, content in documents.items()}
    told = dict(documents) | {DIGESTS: digests}
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    items |= {name: ocp.args.JsonSave(content) for name, content in told.items()}
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(directory, ocp.args.Composite(**items))
    except BaseException:  # orbax renames when all is there; what it had begun stays behind
        for begun in directory.parent.glob(f"{directory.name}.orbax-checkpoint-tmp*"):
            shutil.rmtree(begun, ignore_errors=True)
        raise


def holds(directory: Path, name: str) -> bool:
    """Whether a directory has an item of that name.

    Args:
        directory: what `write` wrote, or any path.
        name: of a tree or a document.

    Returns:
        True or False.
    """
    return (directory / name).is_dir()


def read_document(directory: Path, name: str) -> Any:
    """Read a JSON document.

    Args:
        directory: what `write` wrote.
        name: the document's.

    Returns:
        The JSON value.

    Raises:
        ValueError: it cannot be read, or is not what was written.
    """
    directory = directory.absolute()
    content = _read_document(directory, name)
    _check(directory, name, _document_digest(content))
    return content


def _read_document(directory: Path, name: str) -> Any:
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            arguments = ocp.args.Composite(**{name: ocp.args.JsonRestore()})
            return checkpointer.restore(directory, arguments)[name]
    except Exception as error:  # orbax raises of any class
        raise _unreadable(directory, name, error) from error


def read_tree(directory: Path, name: str) -> dict[str, Any]:
    """Read a tree of arrays, with the names, shapes and dtypes that the file has.

    Tuples come back as lists and named tuples as dictionaries: the file knows names only.

    Args:
        directory: what `write` wrote.
        name: the tree's.

    Returns:
        Nested dictionaries of NumPy arrays.

    Raises:
        ValueError: it cannot be read, or its values are not those that were written.
    """
    directory = directory.absolute()
    kinds = {
        path.name: ocp.JsonCheckpointHandler()
        if (path / "metadata").is_file()
        else ocp.PyTreeCheckpointHandler()
        for path in directory.glob("*/")
    }
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**kinds)) as checkpointer:
            described = checkpointer.metadata(directory).item_metadata[name].tree
            on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described)
            arguments = ocp.args.PyTreeRestore(restore_args=on_host)
            tree: dict[str, Any] = checkpointer.restore(
                directory, ocp.args.Composite(**{name: arguments})
            )[name]
    except Exception as error:  # orbax raises of any class
        raise _unreadable(directory, name, error) from error
    _check(directory, name, digest(tree))
    return tree


def digest(tree: Any) -> str:
    """sha256 over path, dtype, shape and bytes of a tree's leaves, in the order of paths.

    Args:
        tree: of arrays, on the host or on any devices of this process.

    Returns:
        64 hexadecimal digits.
    """
    total = hashlib.sha256()
    for path, leaf in sorted(leaves_by_path(tree).items()):
        array = np.ascontiguousarray(leaf)
        total.update("\0".join((path, array.dtype.name, json.dumps(np.shape(leaf)), "")).encode())
        total.update(array.view(np.uint8).data if array.size else b"")
    return total.hexdigest()


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """A tree's leaves by their path.

    Args:
        tree: nested dictionaries.

    Returns:
        The leaves, in the tree's order.

    >>> leaves_by_path({"norm": {"scale": 1}, "fc": {"kernel": 2}})
    {'fc/kernel': 2, 'norm/scale': 1}
    """
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _document_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check(directory: Path, name: str, found: str) -> None:
    digests = _read_document(directory, DIGESTS)
    if not isinstance(digests, dict) or digests.get(name) != found:
        raise ValueError(f"{directory}: {name} is not what was written; copy the checkpoint again")


def _unreadable(directory: Path, name: str, error: Exception) -> ValueError:
    words = (str(error) or type(error).__name__).split("\n", 1)[0]
    words = words.split(" [tensorstore_spec", 1)[0]  # a page of settings
    return ValueError(f"{directory}: {name} cannot be read ({words}); copy the checkpoint again")
