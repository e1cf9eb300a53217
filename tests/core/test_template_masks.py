"""Which tokens are trained on: chat templates with and without marks, made up and real."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tokenizers import CHATML, CHATML_MARKED, npm_tokenizer, smollm2_tokenizer, tiny_tokenizer
from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import DataError
from twinkle.template import Template
from twinkle.template.tokens import tokenize_spans, tokens_in_spans

TINY = tiny_tokenizer()
TWO_ROUNDS = [
    {'role': 'user', 'content': 'Who are you?'},
    {'role': 'assistant', 'content': 'A model.'},
    {'role': 'user', 'content': 'And who made you?'},
    {'role': 'assistant', 'content': 'The tests.'},
]
REASONED = [
    TWO_ROUNDS[0],
    {'role': 'assistant', 'content': '<think>\nfirst thought\n</think>\n\nA model.'},
    TWO_ROUNDS[2],
    {'role': 'assistant', 'reasoning_content': 'second thought', 'content': 'The tests.'},
]
WEATHER = [
    {'role': 'user', 'content': 'Weather in Paris?'},
    {
        'role': 'assistant',
        'content': None,
        'tool_calls': [{'function': {'name': 'weather', 'arguments': '{"city": "Paris"}'}}],
    },
    {'role': 'tool', 'content': '21 degrees'},
    {'role': 'assistant', 'content': 'It is warm.'},
]
TOOLS = [{'type': 'function', 'function': {'name': 'weather', 'description': 'now', 'parameters': {'type': 'object'}}}]


def runs(template, row):
    """The texts of the stretches of tokens that are trained on."""
    texts = []
    for feature in template.encode(row):
        ids, labels = feature['input_ids'], feature['labels']
        assert all(label in (IGNORE_INDEX, ids[t + 1]) for t, label in enumerate(labels[:-1]))
        assert labels[-1] == IGNORE_INDEX
        current: list[int] = []
        for label in labels:
            if label != IGNORE_INDEX:
                current.append(label)
            elif current:
                texts.append(template.decode(current))
                current = []
    return texts


def chatml_labels(tokenizer, messages):
    """The reference: ids and labels of ChatML by hand, with spans counted while the text is put together."""
    text, spans = '', []
    for message in messages:
        text += f'<|im_start|>{message["role"]}\n'
        begin = len(text)
        text += message['content'] + '<|im_end|>'
        if message['role'] == 'assistant':
            spans.append((begin, len(text)))
        text += '\n'
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded['input_ids']
    said = [any(a < end and begin < b for begin, end in spans) for a, b in encoded['offset_mapping']]
    return ids, [ids[t + 1] if said[t + 1] else IGNORE_INDEX for t in range(len(ids) - 1)] + [IGNORE_INDEX]


class TestChatML:
    @pytest.mark.parametrize('chat_template', [CHATML, CHATML_MARKED], ids=['unmarked', 'marked'])
    def test_two_rounds(self, chat_template):
        """Trained is exactly the content and the end token of both rounds, with marks and without."""
        template = Template(tokenizer=TINY, chat_template=chat_template)
        (feature,) = template.encode({'messages': TWO_ROUNDS})
        assert (feature['input_ids'], feature['labels']) == chatml_labels(TINY, TWO_ROUNDS)
        assert runs(template, {'messages': TWO_ROUNDS}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']

    def test_marks_agree_with_transformers(self):
        """With well-placed marks the mask is that of apply_chat_template."""
        template = Template(tokenizer=TINY, chat_template=CHATML_MARKED)
        (feature,) = template.encode({'messages': TWO_ROUNDS})
        mask = template.tokenizer.apply_chat_template(TWO_ROUNDS, return_assistant_tokens_mask=True)['assistant_masks']
        assert [label != IGNORE_INDEX for label in feature['labels'][:-1]] == [bool(m) for m in mask[1:]]

    @pytest.mark.parametrize(
        'content',
        [
            '',
            ' ',
            '\n\nline',
            'trailing \n',
            '<|im_end|>\n<|im_start|>user\nAnd who made you?<|im_end|>\n<|im_start|>assistant\n',
            '<|im_start|>assistant\n',
            'A model.',
            'emoji 😀 and 汉字',
            'qzm0xczq',
        ],
    )
    def test_awkward_contents(self, content):
        """Empty, blank, or written like the template's own marks: the mask is that of the reference."""
        chat = [TWO_ROUNDS[0], {'role': 'assistant', 'content': content}, *TWO_ROUNDS]
        (feature,) = Template(tokenizer=TINY).encode({'messages': chat})
        assert (feature['input_ids'], feature['labels']) == chatml_labels(TINY, chat)

    def test_users_who_speak_template(self):
        """What a user writes is never trained on, whatever it looks like."""
        chat = [{'role': 'user', 'content': '<|im_end|>\n<|im_start|>assistant\nboo<|im_end|>\n'}, *TWO_ROUNDS[1:]]
        assert runs(Template(tokenizer=TINY), {'messages': chat}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']

    def test_repeated_rounds(self):
        """The same round many times over."""
        chat = TWO_ROUNDS[:2] * 5
        assert runs(Template(tokenizer=TINY), {'messages': chat}) == ['A model.<|im_end|>'] * 5

    def test_last_message_is_not_the_assistants(self):
        """A conversation that goes on after the assistant."""
        chat = [*TWO_ROUNDS, {'role': 'user', 'content': 'Bye'}]
        assert runs(Template(tokenizer=TINY), {'messages': chat}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']


text = st.text(st.characters(exclude_categories=('Cs',)), max_size=20)
turn = st.tuples(text.filter(str.strip), text.filter(str.strip))


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(turn, min_size=1, max_size=4), system=st.none() | text, marked=st.booleans())
def test_trained_tokens_are_the_assistants_words(turns, system, marked):
    """For any conversation, the tokens trained on decode to what the assistant says and the end tokens."""
    template = Template(tokenizer=TINY, system=system, chat_template=CHATML_MARKED if marked else CHATML)
    chat = [m for u, a in turns for m in ({'role': 'user', 'content': u}, {'role': 'assistant', 'content': a})]
    (feature,) = template.encode({'messages': chat})
    assert template.decode(feature['labels']) == ''.join(answer + '<|im_end|>' for _, answer in turns)
    full = chat if system is None else [{'role': 'system', 'content': system}, *chat]
    assert (feature['input_ids'], feature['labels']) == chatml_labels(TINY, full)


def made(user, assistant, prompt='', first=''):
    """A chat template from the parts around a user's and an assistant's content (`C`)."""
    part = {name: value.replace('C', "' + message['content'] + '") for name, value in (('u', user), ('a', assistant))}
    return (
        f"{{{{ '{first}' }}}}{{% for message in messages %}}{{% if message['role'] == 'user' %}}{{{{ '{part['u']}' }}}}"
        f"{{% else %}}{{{{ '{part['a']}' }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )


class TestOtherTemplates:
    @pytest.mark.parametrize(
        ('chat_template', 'want'),
        [
            pytest.param(
                made('[INST] C [/INST]', ' C<|im_end|>'), ['A model.<|im_end|>', 'The tests.<|im_end|>'], id='no prompt'
            ),
            pytest.param(
                made('Q: C\\n', 'A: C\\n', 'A: '), ['A model.\n', 'The tests.\n'], id='white space is the end'
            ),
            pytest.param(
                made('Q: C\\n', 'A:C<|im_end|>\\n', 'A:', first='<|im_start|>You are kind.\\n'),
                ['A model.<|im_end|>', 'The tests.<|im_end|>'],
                id='default system prompt',
            ),
            pytest.param(
                made('<|im_start|>C', 'bot C<|im_end|>', 'bot'),
                [' A model.<|im_end|>', ' The tests.<|im_end|>'],
                id='a space that the model has to say',
            ),
        ],
    )
    def test_forms(self, chat_template, want):
        """Trained is what follows the generation prompt, or the content where a template has none; then the end."""
        template = Template(tokenizer=TINY, chat_template=chat_template)
        assert runs(template, {'messages': TWO_ROUNDS}) == want

    def test_no_end_is_said(self, caplog):
        """A template without an end-of-turn text trains the content and warns that the model learns no end."""
        template = Template(tokenizer=TINY, chat_template=made('<|im_start|>C', '<|im_end|>C', '<|im_end|>'))
        with caplog.at_level('WARNING', logger='twinkle'):
            assert runs(template, {'messages': TWO_ROUNDS}) == ['A model.', 'The tests.']
        assert 'when to stop' in caplog.text

    def test_another_end_for_the_last_turn(self):
        """A template that ends the last turn by another token than earlier ones."""
        chat_template = (
            "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ':' + message['content'] }}"
            "{% if loop.last %}{{ '<|endoftext|>' }}{% else %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
        )
        template = Template(tokenizer=TINY, chat_template=chat_template)
        assert runs(template, {'messages': TWO_ROUNDS}) == ['A model.<|im_end|>', 'The tests.<|endoftext|>']

    def test_trimmed_contents(self):
        """A template that trims contents: trained is what it renders."""
        trimming = CHATML.replace("message['content']", "(message['content'] | trim)")
        template = Template(tokenizer=TINY, chat_template=trimming)
        chat = [{**m, 'content': f'  {m["content"]}\n'} for m in TWO_ROUNDS]
        assert runs(template, {'messages': chat}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']

    def test_prompt_that_opens_thinking(self):
        """A prompt that opens <think>: a turn that repeats it is trained behind it, another one from its start."""
        chat_template = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
        template = Template(tokenizer=TINY, chat_template=chat_template)
        assert runs(template, {'messages': REASONED[:2]}) == ['first thought\n</think>\n\nA model.<|im_end|>']
        assert runs(template, {'messages': TWO_ROUNDS[:2]}) == ['A model.<|im_end|>']

    def test_strict_alternation(self):
        """A template that refuses conversations of another shape is only asked about those that it takes."""
        strict = (
            "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('must alternate') }}{% endif %}{% endfor %}" + CHATML
        )
        template = Template(tokenizer=TINY, chat_template=strict)
        assert runs(template, {'messages': TWO_ROUNDS}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']
        with pytest.raises(DataError, match='must alternate'):
            template.encode({'messages': TWO_ROUNDS[1:]})

    def test_assistant_first(self):
        """A conversation that the assistant opens."""
        assert runs(Template(tokenizer=TINY), {'messages': TWO_ROUNDS[1:]}) == [
            'A model.<|im_end|>',
            'The tests.<|im_end|>',
        ]

    def test_content_dependent_template_is_an_error(self):
        """Where a turn cannot be placed, there is an error that names it, never an empty mask."""
        hiding = CHATML.replace(
            "+ message['content'] +", "+ ('x' if message['role'] == 'assistant' else message['content']) +"
        )
        with pytest.raises(DataError, match=r'Message 1 \(assistant\) cannot be found'):
            Template(tokenizer=TINY, chat_template=hiding).encode({'messages': TWO_ROUNDS})


@pytest.mark.parametrize('chat', [TWO_ROUNDS, TWO_ROUNDS[1:], REASONED, [*TWO_ROUNDS, TWO_ROUNDS[0]]])
@pytest.mark.parametrize('chat_template', [CHATML, made('Q: C\\n', 'A: C\\n', 'A: '), made('[C]', ' C<|im_end|>')])
def test_one_by_one_equals_all_at_once(monkeypatch, chat, chat_template):
    """Placing every turn by itself, in its context, gives what placing all of them in one rendering gives."""
    together = Template(tokenizer=TINY, chat_template=chat_template).encode({'messages': chat})
    monkeypatch.setattr('twinkle.template.masks._find_together', lambda *args: {})
    assert Template(tokenizer=TINY, chat_template=chat_template).encode({'messages': chat}) == together


class TestMarks:
    def test_marks_decide(self):
        """Marks are taken as they are, the newline behind the end included if it is marked."""
        wide = CHATML_MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}", "+ '<|im_end|>\\n' }}{% endgeneration %}")
        template = Template(tokenizer=TINY, chat_template=wide)
        assert runs(template, {'messages': TWO_ROUNDS})[0].startswith('A model.<|im_end|>\n')

    def test_marks_without_the_end_warn(self, caplog):
        """Marks that leave out the end token are obeyed, with a warning."""
        short = CHATML_MARKED.replace(
            "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
            "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
        )
        with caplog.at_level('WARNING', logger='twinkle'):
            assert runs(Template(tokenizer=TINY, chat_template=short), {'messages': TWO_ROUNDS}) == [
                'A model.',
                'The tests.',
            ]
        assert 'leave out the token' in caplog.text

    @pytest.mark.parametrize(
        'broken',
        [
            pytest.param(CHATML + '{% generation %}{% endgeneration %}', id='around nothing'),
            pytest.param('{% if false %}{% generation %}x{% endgeneration %}{% endif %}' + CHATML, id='never reached'),
            pytest.param(
                '{% set all %}' + CHATML_MARKED + '{% endset %}{{ "<|endoftext|>" + all }}', id='shifted by a block'
            ),
        ],
    )
    def test_wrong_marks_never_give_a_wrong_mask(self, broken, caplog):
        """Marks that miss what the assistant says are passed over with a warning."""
        with caplog.at_level('WARNING', logger='twinkle'):
            texts = runs(Template(tokenizer=TINY, chat_template=broken), {'messages': TWO_ROUNDS})
        assert texts == ['A model.<|im_end|>', 'The tests.<|im_end|>']
        assert 'do not cover' in caplog.text

    def test_marks_and_rounds(self):
        """Rounds, flags and weights choose among marked turns."""
        template = Template(tokenizer=TINY, chat_template=CHATML_MARKED, rounds='last')
        assert runs(template, {'messages': TWO_ROUNDS}) == ['The tests.<|im_end|>']

    def test_marks_where_rendering_fails(self):
        """Marks alone are enough where a turn cannot be found by rendering."""
        hiding = CHATML_MARKED.replace("{% generation %}{{ message['content'] + ", "{% generation %}{{ 'yes' + ")
        assert runs(Template(tokenizer=TINY, chat_template=hiding), {'messages': TWO_ROUNDS}) == ['yes<|im_end|>'] * 2


class TestReasoning:
    def test_keep_with_tags_in_the_answer(self, request):
        """An answer that itself holds </think> is kept whole."""
        chat = [REASONED[0], {'role': 'assistant', 'content': '<think>a</think>b </think> c'}, *REASONED[2:]]
        for tokenizer in (TINY, request.getfixturevalue('qwen3')):
            texts = runs(Template(tokenizer=tokenizer, reasoning='keep'), {'messages': chat})
            assert texts[0] == '<think>\na\n</think>\n\nb </think> c<|im_end|>'

    def test_strip_and_keep(self):
        """strip: the first reasoning is absent from the tokens; keep: both are there and trained."""
        stripped = Template(tokenizer=TINY, reasoning='strip')
        (feature,) = stripped.encode({'messages': REASONED})
        assert 'first thought' not in stripped.decode(feature['input_ids'])
        kept = Template(tokenizer=TINY, reasoning='keep')
        assert runs(kept, {'messages': REASONED}) == [
            '<think>\nfirst thought\n</think>\n\nA model.<|im_end|>',
            '<think>\nsecond thought\n</think>\n\nThe tests.<|im_end|>',
        ]

    def test_lost_reasoning_is_said(self, caplog):
        """A chat template that knows no reasoning_content leaves it out, and that is logged."""
        with caplog.at_level('WARNING', logger='twinkle'):
            assert runs(Template(tokenizer=TINY), {'messages': REASONED})[1] == 'The tests.<|im_end|>'
        assert 'reasoning="keep"' in caplog.text


class TestTokens:
    def test_token_merged_across_the_border(self):
        """A token that holds the end of the prompt and the beginning of the answer is trained on."""
        merged = TINY.convert_tokens_to_ids('user')
        template = Template(tokenizer=TINY, chat_template=made('<|im_start|>C', '\\nusC<|im_end|>', '\\nus'))
        (feature,) = template.encode(
            {'messages': [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'er.'}]}
        )
        assert merged in feature['input_ids']
        assert template.decode(feature['labels']) == 'user.<|im_end|>'

    def test_offsets(self):
        """Overlap decides; tokens of white space with empty offsets lie where the one before ended."""
        assert tokens_in_spans([(0, 2), (2, 5), (5, 6)], [(3, 5)]) == [-1, 0, -1]
        assert tokens_in_spans([(0, 2), (4, 4), (4, 6)], [(2, 6)]) == [-1, 0, 0]
        assert tokens_in_spans([(0, 1), (0, 1), (1, 2)], [(0, 1)]) == [0, 0, -1]
        assert tokens_in_spans([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (2, 3)]) == [0, -1, 1, -1]
        assert tokens_in_spans([(0, 1)], []) == [-1]

    def test_tokenizer_without_offsets(self):
        """A tokenizer that gives no offsets gets the same mask."""

        class Slow:
            is_fast = False

            def encode(self, text, add_special_tokens):
                return TINY.encode(text, add_special_tokens=add_special_tokens)

        text = '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes it is<|im_end|>\n<|im_start|>user\n'
        begin = text.index('yes')
        spans = [(begin, text.index('<|im_end|>', begin) + len('<|im_end|>'))]
        assert tokenize_spans(Slow(), text, spans) == tokenize_spans(TINY, text, spans)


@pytest.fixture(scope='session')
def qwen3():
    """Qwen3's tokenizer."""
    return npm_tokenizer('qwen3')


@pytest.fixture(scope='session')
def llama3():
    """Llama 3.1's tokenizer."""
    return npm_tokenizer('llama3_1')


@pytest.fixture(scope='session')
def deepseek():
    """DeepSeek V3's tokenizer."""
    return npm_tokenizer('deepseek_v3')


@pytest.fixture(scope='session')
def smollm2():
    """SmolLM2's tokenizer."""
    return smollm2_tokenizer()


def spans_by_search(template, row, header, end):
    """The reference for real templates: what stands between a header and an end, found by a regular expression."""
    text = template.decode(template.encode(row)[0]['input_ids'])
    return re.findall(re.escape(header) + r'(.*?' + re.escape(end) + ')', text, re.DOTALL)


class TestRealTokenizers:
    @pytest.mark.parametrize(
        ('name', 'header', 'end'),
        [
            ('qwen3', '<|im_start|>assistant\n', '<|im_end|>'),
            ('llama3', '<|start_header_id|>assistant<|end_header_id|>\n\n', '<|eot_id|>'),
            ('deepseek', '<\uff5cAssistant\uff5c>', '<\uff5cend▁of▁sentence\uff5c>'),
            ('smollm2', '<|im_start|>assistant\n', '<|im_end|>'),
        ],
    )
    def test_conversations(self, request, name, header, end):
        """Two rounds, with and without a system prompt: what stands behind each header up to its end token."""
        template = Template(tokenizer=request.getfixturevalue(name))
        for chat in (TWO_ROUNDS, [{'role': 'system', 'content': 'Be kind.'}, *TWO_ROUNDS]):
            texts = runs(template, {'messages': chat})
            assert texts == spans_by_search(template, {'messages': chat}, header, end)
            assert [re.sub(r'(?s)<think>.*</think>\s*', '', t) for t in texts] == [f'A model.{end}', f'The tests.{end}']
            (feature,) = template.encode({'messages': chat})
            assert feature['input_ids'] == template.tokenizer.apply_chat_template(chat, return_dict=False)
        prompt = template.encode_prompt(TWO_ROUNDS[:3])
        assert template.decode(prompt).endswith(header)

    def test_qwen3_reasoning(self, qwen3):
        """Qwen3 strips earlier reasoning, which is then neither there nor trained; keep brings it back."""
        row = {'messages': REASONED}
        last = '<think>\nsecond thought\n</think>\n\nThe tests.<|im_end|>'
        assert runs(Template(tokenizer=qwen3), row) == ['A model.<|im_end|>', last]
        assert runs(Template(tokenizer=qwen3, reasoning='strip'), row) == ['A model.<|im_end|>', last]
        kept = ['<think>\nfirst thought\n</think>\n\nA model.<|im_end|>', last]
        assert runs(Template(tokenizer=qwen3, reasoning='keep'), row) == kept

    def test_qwen3_without_thinking(self, qwen3):
        """With thinking off the empty <think> block belongs to the prompt."""
        template = Template(tokenizer=qwen3, chat_template_kwargs={'enable_thinking': False})
        assert runs(template, {'messages': TWO_ROUNDS}) == ['A model.<|im_end|>', 'The tests.<|im_end|>']

    @pytest.mark.parametrize('arguments', ['{"city": "Paris"}', {'city': 'Paris'}])
    def test_qwen3_tools(self, qwen3, arguments):
        """The tool call is trained on, its result and the schemas are not; arguments may be text or a mapping."""
        call = {**WEATHER[1], 'tool_calls': [{'function': {'name': 'weather', 'arguments': arguments}}]}
        row = {'messages': [WEATHER[0], call, *WEATHER[2:]], 'tools': TOOLS}
        template = Template(tokenizer=qwen3)
        assert runs(template, row) == [
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
            '<think>\n\n</think>\n\nIt is warm.<|im_end|>',
        ]
        assert '# Tools' in template.decode(template.encode(row)[0]['input_ids'])
        off = Template(tokenizer=qwen3, chat_template_kwargs={'enable_thinking': False})
        assert runs(off, row)[0].startswith('<tool_call>')

    def test_qwen3_tool_call_beside_content(self, qwen3):
        """Content and two tool calls in one turn are all trained on."""
        calls = WEATHER[1]['tool_calls'] * 2
        row = {'messages': [WEATHER[0], {'role': 'assistant', 'content': 'I look.', 'tool_calls': calls}, *WEATHER[2:]]}
        one = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        assert runs(Template(tokenizer=qwen3), row)[0] == f'I look.{one}{one}<|im_end|>'

    def test_deepseek_tools(self, deepseek):
        """DeepSeek's template wants content None and arguments as text, and has no header behind tool results."""
        call = {**WEATHER[1], 'tool_calls': [{'function': {'name': 'weather', 'arguments': {'city': 'Paris'}}}]}
        texts = runs(Template(tokenizer=deepseek), {'messages': [WEATHER[0], call, *WEATHER[2:]]})
        assert texts[0].endswith('weather\n```json\n{"city": "Paris"}\n```<\uff5ctool▁call▁end\uff5c>')
        assert texts[0].startswith('<\uff5ctool▁calls▁begin\uff5c>')
        assert texts[1] == 'It is warm.<\uff5cend▁of▁sentence\uff5c>'

    @pytest.mark.parametrize('name', ['llama3', 'smollm2'])
    def test_tool_calls_that_would_be_lost(self, request, name):
        """A chat template that renders no tool calls is refused rather than training on nothing."""
        with pytest.raises(DataError, match='does not render tool calls'):
            Template(tokenizer=request.getfixturevalue(name)).encode({'messages': WEATHER})

    def test_pads(self, llama3, smollm2, qwen3):
        """Llama has no pad token and gets one of its own vocabulary; SmolLM2's pad is its end token."""
        template = Template(tokenizer=llama3)
        assert template.pad_token_id < len(llama3) == len(template.tokenizer)
        assert Template(tokenizer=smollm2).pad_token_id == smollm2.eos_token_id
        assert Template(tokenizer=qwen3).pad_token_id == qwen3.pad_token_id
