"""Heat maps whose rows and columns are tokens."""

TOKEN_STYLE = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}  # I and l look different


def draw_heat_map(axes, values, labels, **colors):
    """Draws values, (T, T), with the same labels for rows and columns. Returns the image.

    `colors` are arguments of imshow.
    """
    rotation = 90 if max(map(len, labels)) > 2 else 0
    axes.tick_params(labelsize=6)
    axes.set_xticks(range(len(labels)), labels, rotation=rotation, **TOKEN_STYLE)
    axes.set_yticks(range(len(labels)), labels, **TOKEN_STYLE)
    return axes.imshow(values.numpy(), **colors)


def format_token(tokenizer, token):
    """Returns a token's text, with visible spaces and line breaks; bytes if they are no text."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        text = tokenizer.token_bytes(token)
    return repr(text).removeprefix("b")[1:-1].replace(" ", "␣")
