"""A union of tokenizers whose new tokens get the same ids in every process."""

from collections.abc import Mapping
from typing import Any

from mergekit.tokenizer import build
from mergekit.tokenizer.build import BuildTokenizer, TokenizerInfo


class BuildOrderedTokenizer(BuildTokenizer):
    """Builds what MergeKit builds, walking each vocabulary in the order of its ids.

    MergeKit walks it as the tokenizer's hash map comes, so that two new tokens of one
    model change places from process to process, and with them rows of the embeddings.
    """

    def execute(self, **arguments: Any) -> TokenizerInfo:
        """Build the tokenizer and the maps of ids."""
        module: Any = build
        original = module.build_union_tokenizer

        def build_union(
            base_tok: Any, tokenizers: Mapping[Any, Any], **options: Any
        ) -> Any:
            ordered = {model: _ById(known) for model, known in tokenizers.items()}
            return original(base_tok, ordered, **options)

        module.build_union_tokenizer = build_union
        try:
            return super().execute(**arguments)
        finally:
            module.build_union_tokenizer = original


class _ById:
    """A tokenizer whose vocabulary comes by id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def get_vocab(self) -> dict[str, int]:
        vocabulary = self._tokenizer.get_vocab()
        return dict(sorted(vocabulary.items(), key=lambda item: item[1]))
