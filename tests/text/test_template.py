import sys
import threading
import time

import pytest
from jinja2.exceptions import SecurityError
from transformers import AutoTokenizer

from bladellm_runtime.text import template
from bladellm_runtime.text.template import ChatTemplate, TemplateLimitError
from tests.text.samples import DEMO

CHAT = [
    {"role": "system", "content": ' Be <brief> & "kind". '},
    {"role": "user", "content": "Hello\n"},
    {"role": "assistant", "content": "Hi", "tool_calls": [{"name": "f", "arguments": {"a": [1, None, "é"]}}]},
]
SAME_AS_TRANSFORMERS = [
    "{% for m in messages %}{{ loop.index0 }}{{ m['role'] ~ ': ' + m.content | trim }}\n{% endfor %}",
    "  {% if messages[0].role == 'system' %}  {% set sys = messages[0].content %}\n{{ sys }}{% endif %}\n  x",
    "{{ messages | tojson(indent=2) }}{{ messages[2].tool_calls | tojson }}",
    "{% set ns = namespace(n=0, t='') %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% set ns.t = ns.t ~ m.role ~ ns.n ~ missing %}{% endfor %}{{ ns.t }}",
    "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ show(m) }}{% break %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ '%02d' % 7 }}{{ '%s-%s' | format(1, 2) }}{{ 3 * 'ab' }}{{ [1] * 2 + [3] }}"
    "{{ 7 % 4 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}",
    "{% set x %}{{ messages[1].content }}{% endset %}{{ x | upper }}{{ 'a,b'.split(',') }}{{ 'x' is string }}",
    "{{ bos_token }}{{ dict(a=1).items() | list }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ strftime_now('%Y') }}"
    "{% for m in messages[::-1] %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
]


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.mark.parametrize("source", SAME_AS_TRANSFORMERS)
def test_renders_like_transformers(source, reference):
    expected = reference.apply_chat_template(CHAT, chat_template=source, tokenize=False)
    variables = {"messages": CHAT, "add_generation_prompt": False, "bos_token": "<|endoftext|>"}
    assert ChatTemplate(source).render(variables) == expected


@pytest.mark.turns("hostile templates")
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = i * j %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for i in range(100000) %}{{ f() }}{% endfor %}{% endmacro %}"
        "{% for i in range(100000) %}{% set x = namespace() %}"
        "{% for j in range(100000) %}{{ '' }}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}"
        "{% if range(100000) | map('string') | select('equalto', 'x') | list %}{% endif %}{% endfor %}",
        "{% set x = [] %}{% for i in range(100000) %}{% set y = range(99999) | list | sort | join %}{% endfor %}",
    ],
)
def test_endless_templates_end_at_the_time_limit(source, monkeypatch):
    monkeypatch.setattr(template, "PROBE_SECONDS", 0.1)
    begin = time.monotonic()
    with pytest.raises(TemplateLimitError, match="ran for more than"):
        ChatTemplate(source).render({"messages": []}, seconds=0.1)
    assert time.monotonic() - begin < 5


@pytest.mark.turns("hostile templates")
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}a{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [1] * 10 ** 9 }}",
        "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = t %}{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='aa') %}"
        "{% for i in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set ns = namespace(x=9999) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_huge_templates_end_at_a_limit(source):
    begin = time.monotonic()
    with pytest.raises((TemplateLimitError, OverflowError, RecursionError, SecurityError)):
        ChatTemplate(source).render({"messages": []}, seconds=10)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__ }}{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_holds(source):
    try:
        text = ChatTemplate(source).render({"messages": []})
    except Exception:
        return
    assert text in ("", "{}")


def test_the_limit_belongs_to_one_thread_and_is_gone_afterwards(monkeypatch):
    monkeypatch.setattr(template, "PROBE_SECONDS", 0.1)
    traced = sys.gettrace()
    slow = ChatTemplate("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}")
    failures = []

    def run():
        try:
            slow.render({"messages": []}, seconds=0.3)
        except TemplateLimitError:
            failures.append(sys.gettrace())

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(50):
        assert ChatTemplate("{{ messages | length }}").render({"messages": [1]}) == "1"
    thread.join()
    assert failures == [None]
    assert sys.gettrace() is traced


def test_output_is_bounded_in_the_middle_of_the_template(monkeypatch):
    monkeypatch.setattr(template, "MAX_RENDERED_CHARS", 10)
    assert ChatTemplate("{{ 'a' * 5 }}{{ 'b' * 5 }}").render({}) == "aaaaabbbbb"
    with pytest.raises(TemplateLimitError):
        ChatTemplate("{{ 'a' * 5 }}{{ 'b' * 5 }}c").render({})
    for hidden in ("{% set x = 'a' * 5 ~ 'b' * 6 %}", "{% set x %}{{ 'a' * 6 }}{{ 'b' * 6 }}{% endset %}"):
        with pytest.raises(TemplateLimitError):
            ChatTemplate(hidden).render({})


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nothing %}", "{{ x | nofilter }}", "{{ 1 | center(9) }}"])
def test_bad_sources_name_the_line(source):
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n" + source)
    with pytest.raises(ValueError, match="nested"):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}")
