"""What objects are: whether two do the same, and what a run is recognised by when it goes on.

portrait.py   an object as plain JSON, and the first difference of two
walk.py       values, containers, objects, modules: all that they hold
kinds.py      classes and functions: by name, or by their code and what it reads
code.py       code as a digest that comments and formatting do not change
origin.py     whose code it is: well known, an installed package's, the user's
content.py    tensors and long lists as short texts
"""

from undrift.identity.content import digest
from undrift.identity.portrait import Portrait, places, portrait, same, unlike

__all__ = ["Portrait", "digest", "places", "portrait", "same", "unlike"]
