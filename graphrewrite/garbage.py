"""Work on graphs of many nodes without Python's cyclic garbage collector running all through it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Holds the collector back, which is otherwise what a rewrite spends most of its time on.

    A graph is one large cycle of nodes and values. Making one allocates so many objects that the collector runs over
    all of them again and again, which makes linear work quadratic, and finds nothing: the graph is in use.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
