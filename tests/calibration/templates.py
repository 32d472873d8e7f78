"""Chat templates with the features of real templates."""

# Content as text, without tools, like SmolLM2's and Zephyr's.
PLAIN = """{% for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] }}{{ eos_token }}
{% endfor %}"""
# Content as text or parts, tools in the system turn, calls as JSON, like Qwen2.5's and Hermes'.
TOOLS = """{%- if tools %}<|system|>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}<|assistant|>
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}{% set call = call.function if call.function else call %}
<tool_call>{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}</tool_call>{% endfor %}
{{- '<|end|>' }}
{%- elif message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}{% endfor %}"""
# Loops over the parts of a content in a macro, arguments as pairs, thinking in a block (Qwen3.5).
PARTS = """{%- macro shown(content) %}{% if content is string %}{{ content }}{% else %}
{%- for item in content %}
{%- if 'image' in item or item.type == 'image' %}<|image|>{% elif 'text' in item %}{{ item.text }}{% endif %}
{%- endfor %}{% endif %}{% endmacro %}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content is string %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- shown(message.content) }}
{%- for call in message.tool_calls or [] %}<call {{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}<{{ key }}>{{ value }}{% endfor %}{% endfor %}<|end|>
{%- endfor %}"""
# Loops over the parts inside the loop over messages, after a slice and an alias, like Llama 3.2's.
SLICED = """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}<|{{ message['role'] }}|>
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"""
# Supports the role developer.
DEVELOPER = """{% for message in messages %}{% if message.role == "developer" %}
{{- '[dev ' }}{{ message.tools | tojson }}]
{%- endif %}<{{ message.role }}>{{ message.content }}{% endfor %}"""
# Requires that user and assistant alternate. Has a block for training (Mistral).
STRICT = """{{ bos_token }}{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate.') }}{% endif %}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"""
ALL = {
    "plain": PLAIN,
    "tools": TOOLS,
    "parts": PARTS,
    "sliced": SLICED,
    "developer": DEVELOPER,
    "strict": STRICT,
}
