"""A word-level tokenizer; by default with Qwen2.5-VL's special tokens and chat template."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.synthetic.vocabulary import COLOURS, PLURALS, QUARTERS, SHAPES, TIME_RANGES

SPECIAL = ("<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

_PHRASES = (
    "system user assistant You are a helpful assistant",
    "What colour is the Which shape is Which digit is Is there a an How many are there",
    "Which came first , the or the Which came last When does the appear Answer with the option ' s letter",
    "yes no digit shape appear video color in at it one",
    " ".join(COLOURS),
    " ".join(SHAPES),
    " ".join(PLURALS.values()),
    " ".join(name for _, name in TIME_RANGES),
    " ".join(str(n) for n in range(61)),
    ". , ? : ' - \n",
)

_PLACES = ("Where", *QUARTERS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(
    special: tuple[str, ...] = SPECIAL, chat_template: str = CHAT_TEMPLATE, names: dict[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer: one token a word, a punctuation mark or a line break; anything else is `<|unk|>`.

    Args:
        special: special tokens, in the order of their ids.
        names: what a processor calls some of them, for architectures whose processor asks for them by name; these also ask about places.
    """
    words = dict.fromkeys(special)
    words |= dict.fromkeys(string.ascii_uppercase)
    for phrase in (*_PHRASES, *(_PLACES if names else ())):
        words |= dict.fromkeys(phrase.replace("\n", " \n ").split(" "))
    words.pop("", None)
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), behavior="removed", invert=True)
    core.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<|unk|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=names or list(special[2:]),
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
        chat_template=chat_template,
    )
