"""Chat templates in the forms of public model cards: each uses a name, filter or tag that jinja itself does not bring."""

FORMS = {
    "thinking that can be switched off": ("""
{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.looking and m.role == 'user' and not (m.content.startswith('<tool_response>')) %}
        {%- set ns.looking = false %}{%- set ns.last = (messages | length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n').strip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- if loop.index0 > ns.last %}{%- set content = '<think>\n' + thought + '\n</think>\n\n' + content %}{%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""", [{}, {"enable_thinking": False}, {"enable_thinking": True}]),
    "headers with a date": ("""
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{{- 'Today Date: ' + date_string + '\n\n' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {%- if loop.first and tools %}
        {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {%- endif %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif m.content is mapping or m.content is iterable and m.content is not string %}{{- m.content | tojson }}
    {%- else %}{{- m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
        [{}, {"date_string": "26 Jul 2024"}, {"tools": True}]),
    "flags in the system message": ("""
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set messages = messages[1:] %}
    {%- if '/no_think' in system %}{%- set mode = '/no_think' %}
    {%- elif '/think' in system %}{%- set mode = '/think' %}{%- endif %}
    {%- set own = system.replace('/no_think', '').replace('/think', '').rstrip() %}
{%- endif %}
{{- 'Today Date: ' ~ strftime_now('%d %B %Y') ~ '\nReasoning Mode: ' ~ mode ~ '\n\n' }}
{{- own ~ '\n\n' if own else 'You are a model.\n\n' }}
{%- for tool in xml_tools or [] %}{{- tool | string ~ '\n' }}{%- endfor %}
{%- for tool in python_tools or [] %}{{- '```' ~ tool ~ '```\n' }}{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role in ['user', 'tool'] %}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {% generation %}
        {{- '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') }}
        {{- content.lstrip('\n') + '<|im_end|>\n' }}
        {% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
        [{}, {"enable_thinking": False}, {"xml_tools": [{"name": "f", "é": None}], "python_tools": ["g()"]}]),
    "every special token": (
        "{{ bos_token }}{{ unk_token }}{{ sep_token }}{{ cls_token }}{{ mask_token }}{{ pad_token }}{{ image_token }}"
        "{{ additional_special_tokens }}{{ extra_special_tokens }}{% for m in messages %}{{ m.content }}{{ eos_token "
        "}}{% endfor %}",
        [{}, {"eos_token": "[END]"}]),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ '# ' ~ m.content ~ '\n' }}{% continue %}{% endif %}"
        "{% if loop.index > 4 %}{% break %}{% endif %}{{ loop.cycle('A', 'B') }}: {{ m.content }}{{ '\n' if not loop.last }}"
        "{% endfor %}", [{}]),
    "JSON laid out": (
        "{{ messages | tojson(indent=2, sort_keys=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}{% for m in messages %}"
        "{{ m | tojson }}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}", [{}]),
    "what is not there": (
        "{{ tools is defined }} {{ documents is none }} {{ nothing is defined }} {% if tools is none and not nothing "
        "%}-{% endif %}"
        "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }} {{ dict(b=1).b }}"
        "{{ messages[-1].content }}", [{}]),
}  # fmt: skip
