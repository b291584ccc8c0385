"""Photographs and the task made of them: real, reproducible, without a download."""

import subprocess
import sys

import pytest

from relax_tq_rdma import StartError
from relax_tq_rdma.demo import pictures, prompts


def test_photographs_are_in_the_installed_package_and_colourful():
    for name in pictures.PHOTOGRAPHS:
        image = pictures.photograph(name)
        assert image.mode == "RGB"
        assert min(image.size) >= 300
        assert len(set(image.resize((16, 16)).tobytes())) > 16


def test_drawing_imports_neither_a_downloader_nor_scikit_image():
    code = (
        "import sys; from relax_tq_rdma.demo.prompts import draw_prompt; "
        "assert draw_prompt(0, 0).image is not None; "
        "print([m for m in ('skimage', 'pooch', 'requests', 'urllib.request') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_missing_photograph_is_a_sentence():
    with pytest.raises(StartError, match=r"nothing\.png .* cannot be read .*vision"):
        pictures.photograph("nothing.png")


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr(pictures.util, "find_spec", lambda name: None if name == "transformers" else object())
    with pytest.raises(StartError, match=r"needs transformers, .*pip install 'relax-tq-rdma\[vision\]'"):
        pictures.require_vision_extra()


def test_prompts_repeat_with_the_seed_and_differ_without():
    first, again, other = prompts.draw_prompt(1, 3), prompts.draw_prompt(1, 3), prompts.draw_prompt(2, 3)
    assert first.image.tobytes() == again.image.tobytes()
    assert (first.text, first.answer) == (again.text, again.answer)
    assert first.image.tobytes() != other.image.tobytes()


def test_one_prompt_in_eight_is_text_only_with_the_right_sum():
    drawn = [prompts.draw_prompt(0, index) for index in range(32)]
    text_only = [prompt for prompt in drawn if prompt.image is None]
    assert [prompt.index for prompt in text_only] == [7, 15, 23, 31]
    for prompt in text_only:
        left, right = (int(word.strip("?")) for word in prompt.text.split() if word.strip("?").isdigit())
        assert prompt.answer == divmod(left + right, 10)


def test_answers_are_the_brightness_of_the_quarters():
    from PIL import Image

    image = Image.new("RGB", (40, 40))
    image.paste((255, 255, 255), (20, 0, 40, 20))
    image.paste((128, 128, 128), (0, 20, 20, 40))
    assert prompts.brightness(image) == (0, 9, 5, 0)


def test_rewards_and_advantages():
    assert prompts.reward([3, 4], (3, 4)) == 1.0
    assert prompts.reward([0], (9,)) == 0.0
    assert prompts.reward([3, 6], (3, 4)) == pytest.approx(1 - 2 / 18)
    advantages = prompts.group_advantages([0.0, 1.0, 1.0, 0.0])
    assert advantages == pytest.approx([-1, 1, 1, -1], abs=1e-4)
    assert prompts.group_advantages([0.5, 0.5]) == [0.0, 0.0]
