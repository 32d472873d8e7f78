"""Values of JSON."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
