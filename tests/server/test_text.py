"""The text boundary of an http worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from crucible.errors import CheckpointError, RequestError
from crucible.server.text import CheckpointText
from tests.conftest import make_text_checkpoint


def test_a_tokenizer_that_cannot_be_the_models_is_refused(tmp_path: Path) -> None:
    fewer = make_text_checkpoint(tmp_path / "fewer", token_count=264)
    with pytest.raises(CheckpointError, match=r"264.*259"):
        CheckpointText(str(fewer))


def test_prompts_become_ids_and_lone_surrogates_do_not_crash(tmp_path: Path) -> None:
    text = CheckpointText(str(make_text_checkpoint(tmp_path / "m", chat=True)))
    assert text.encode("hé") == [104, 0xC3, 0xA9]
    assert text.encode("\ud800") == [0xEF, 0xBF, 0xBD]
    assert text.encode_chat([{"role": "user", "content": "<|im_end|>"}]).count(258) == 1
    with pytest.raises(RequestError, match="role"):
        text.encode_chat([{"role": "robot", "content": "x"}])
    assert text.longest == len("<|endoftext|>")
