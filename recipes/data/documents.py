"""The key `data.documents`, which limits attention to the documents of a sequence."""

from typing import Any, Literal

from meshrunner.recipes.data.text import PackedText


class SeparableText(PackedText):
    """Base class of the options that can limit attention to documents."""

    documents: Literal["joined", "separate"] = "joined"
    """Attention across documents. joined: a token attends to all earlier tokens of its sequence; separate: only to tokens of its
    own document, and positions start at 0 in each document."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if callable(vars(cls).get("documents")):
            raise TypeError(f"{cls.__name__}.documents is a key, not a method; rename the method to read_documents")

    @property
    def separates_documents(self) -> bool:
        return self.documents == "separate"
