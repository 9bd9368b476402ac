"""Twenty chat templates in the forms that public model cards have: each uses something that no other does; and arguments."""

_CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

FORMS = {
    "ChatML": ("{% for m in messages %}" + _CHATML + "{% endfor %}" + _ASKS, [{}]),
    "ChatML with a system message of its own": ("""
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif %}
    {{- '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] | trim ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""", [{}]),
    "tools as JSON lines in the system message": ("""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
        {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role in ('user', 'assistant') and not m.tool_calls %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in m.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
                {{- '}\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""", [{}, {"tools": True}]),
    "thinking that can be switched off": ("""
{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for m in messages[::-1] %}
    {%- set at = (messages | length - 1) - loop.index0 %}
    {%- if ns.looking and m.role == 'user' and not (m.content.startswith('<tool_response>')) %}
        {%- set ns.looking = false %}{%- set ns.last = at %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""", [{}, {"enable_thinking": False}, {"enable_thinking": True}]),
    "INST with the system message inside": ("""
{%- if messages[0]['role'] == 'system' %}{%- set rest = messages[1:] %}{%- set system = messages[0]['content'] %}
{%- else %}{%- set rest = messages %}{%- set system = false %}{%- endif %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles alternate') }}{%- endif %}
    {%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content if loop.index0 == 0 and system else m.content %}
    {%- if m.role == 'user' %}{{- bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}{{- ' ' + content | trim + ' ' + eos_token }}{%- endif %}
{%- endfor %}""", [{}]),
    "headers with a date": ("""
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{{- 'Today Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}
{%- if tools_in_user_message and tools %}
    {%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif m.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if m.content is mapping or m.content is iterable and m.content is not string %}{{- m.content | tojson }}
        {%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}
    {%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
        [{}, {"date_string": "26 Jul 2024"}, {"tools": True}, {"tools": True, "tools_in_user_message": False}]),
    "INST with available tools": ("""
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.function.items() if key != 'return' %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}{%- if not loop.last %}{{- ', ' }}
                        {%- endif %}
                {%- endfor %}{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}
            {%- endfor %}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('ids have nine signs') }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('only user, assistant and tool') }}{%- endif %}
{%- endfor %}""", [{}, {"tools": True}]),
    "turns, the system message in the first": ("""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set before = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set before = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set before = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
    {%- if m['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}{%- set role = m['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (before if loop.first else '') }}
    {%- if m['content'] is string -%}{{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for item in m['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""", [{}]),
    "thinking left out, wide bars": ("""
{%- if not add_generation_prompt is defined %}{%- set add_generation_prompt = false %}{%- endif %}
{%- set ns = namespace(system='', first=true) %}
{%- for m in messages %}{%- if m['role'] == 'system' %}{%- set ns.system = m['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}{%- endif %}
    {%- if m['role'] == 'assistant' and m['content'] is defined %}
        {%- set content = m['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}""", [{}]),
    "roles with documents and a switch": ("""
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = 'Knowledge ends in 2024. Today is ' + strftime_now('%B %d, %Y') + '.' %}
    {%- if tools and documents %}{%- set system = system + ' You have tools and documents.' %}
    {%- elif documents %}{%- set system = system + ' Use the documents.' %}
    {%- elif thinking %}{%- set system = system + ' Think first.' %}{%- endif %}
    {%- if 'citations' in controls %}{%- set system = system + '\nUse <co> and </co>.' %}{%- endif %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\n' }}
    {%- endif %}
{%- if documents %}
    {{- '<|start_of_role|>documents<|end_of_role|>' }}
    {%- for d in documents %}{{- 'Document ' + loop.index0 | string + '\n' + d['text'] }}
        {%- if not loop.last %}{{- '\n\n' }}{%- endif %}{%- endfor %}{{- '<|end_of_text|>\n' }}
{%- endif %}
{%- for m in rest %}
    {{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}{{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}""", [{"controls": ["citations"]}, {"controls": [], "thinking": True},
                   {"controls": {"length": "long"}, "documents": [{"text": "One."}, {"text": "Two."}]}]),
    "channels, macros and effort": ("""
{%- macro kind(spec) -%}
    {%- if spec.type == 'array' -%}{{- kind(spec['items']) + '[]' -}}
    {%- elif spec.type == 'string' and spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- else -%}{{- spec.type | default('any') -}}{%- endif -%}
{%- endmacro -%}
{%- macro listed(tools) -%}
    {{- 'namespace functions {\n\n' }}
    {%- for tool in tools %}{%- set f = tool.function %}{{- '// ' + f.description + '\ntype ' + f.name + ' = (_: {\n' }}
        {%- for name, spec in f.parameters.properties.items() %}
            {{- name }}{%- if name not in (f.parameters.required or []) %}{{- '?' }}{%- endif %}
                {{- ': ' + kind(spec) + ',\n' }}
        {%- endfor %}{{- '}) => any;\n\n' }}
    {%- endfor %}{{- '} // namespace functions' }}
{%- endmacro -%}
{%- if model_identity is not defined %}{%- set model_identity = 'You are a model.' %}{%- endif %}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- '<|start|>system<|message|>' + model_identity + '\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: ' }}
{{- reasoning_effort + '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}{%- set developer = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set developer = '' %}{%- set rest = messages %}{%- endif %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' }}{%- if developer %}{{- '# Instructions\n\n' + developer + '\n\n' }}{%- endif %}
    {%- if tools %}{{- '# Tools\n\n' }}{{- listed(tools) }}{%- endif %}{{- '<|end|>' }}
{%- endif %}
{%- for m in rest %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
        {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
    {%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}{{- '<|start|>functions<|channel|>commentary<|message|>' }}{{- m.content | tojson }}
        {{- '<|end|>' }}
    {%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""",
        [{}, {"reasoning_effort": "high"}, {"tools": True, "model_identity": "A \u201cnew\u201d one."}]),
    "flags in the system message": ("""
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- if '/no_think' in system %}{%- set mode = '/no_think' %}{%- elif '/think' in system %}{%- set mode = '/think' %}
        {%- endif %}
    {%- set own = system.replace('/no_think', '').replace('/think', '').rstrip() %}
{%- endif %}
{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' ~ strftime_now('%d %B %Y') ~ '\nReasoning Mode: ' ~ mode ~ '\n\n' }}
{{- own ~ '\n\n' if own else 'You are a model.\n\n' }}
{%- if xml_tools or python_tools %}
    {{- '### Tools\n\n' }}{%- for tool in xml_tools %}{{- tool | string ~ '\n' }}{%- endfor %}
    {%- for tool in python_tools %}{{- '```' ~ tool ~ '```\n' }}{%- endfor %}
{%- endif %}{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' %}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {% generation %}
        {%- if mode == '/think' %}{{- '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- else %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}{%- endif %}
        {% endgeneration %}
    {%- elif m.role == 'tool' %}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' if mode == '/think' else '<|im_start|>assistant\n<think>\n\n</think>\n' }}
{%- endif %}""", [{}, {"enable_thinking": False}, {"xml_tools": [{"name": "f", "é": None}], "python_tools": ["g()"]}]),
    "numbered rounds": (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[Round ' ~ (loop.index0 // 2 + 1) ~ ']\n\nQ: ' ~ m['content'] ~ "
        "'\n\nA: ' }}{% elif m['role'] == 'assistant' %}{{ m['content'] ~ '\n\n' }}{% endif %}{% endfor %}", [{}]),
    "masked prefix, role and newline": (
        "[gMASK]<sop>{% if tools %}<|system|>\n# Tools{% for tool in tools %}\n\n## {{ tool['function']['name'] }}\n\n"
        "{{ tool['function'] | tojson(indent=4) }}{% endfor %}{% endif %}{% for m in messages %}<|{{ m['role'] }}|>\n"
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not "
        "enable_thinking %}\n<think></think>{% endif %}{% endif %}", [{}, {"enable_thinking": False}, {"tools": True}]),
    "contents in parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}{{ image_token }}{% endif %}"
        "{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}" + _ASKS, [{}]),
    "role names of their own": (
        "{% for m in messages %}{% set role = {'user': '<|prompter|>', 'assistant': '<|assistant|>', 'system': '<|system|>'}"
        ".get(m.role, '<|user|>') %}{{ role ~ m.content ~ eos_token }}{% endfor %}<|assistant|>", [{}]),
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
