"""A run's copy in object storage, from which another computer can take the run over.

objects.py    named objects below a URL: a bucket of one of the clouds, or a folder
sequence.py   the journal as numbered objects, each of which is written once
mirror.py     one run's copy, and how a controller takes the run
journal.py    a journal whose events are durable only when they are in the store, too
uploads.py    artefacts, kept files and results, on their way there and back
"""

from __future__ import annotations

from .journal import MirroredJournal
from .mirror import Mirror
from .objects import StoreAway, StoreRefused, open_bucket, open_objects, store_url, try_out
from .sequence import JournalSequence, the_run
from .uploads import collected_in, lacks_files

__all__ = [
    "JournalSequence",
    "Mirror",
    "MirroredJournal",
    "StoreAway",
    "StoreRefused",
    "collected_in",
    "lacks_files",
    "open_bucket",
    "open_objects",
    "store_url",
    "the_run",
    "try_out",
]
