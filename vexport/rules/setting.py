"""Rules of values that do not fit the type of their setting, as pydantic reports them."""

from vexport.rules.book import Rule

VALUE = Rule("setting/value", got="{found}", need="{need}", do="{do}")
MISSING = Rule("setting/missing", got="the key is missing", do="{do}")
