"""A model that reads images, with a chat template, and two images."""

import base64
import io
from pathlib import Path

from image_models import FAMILIES, picture, save
from PIL import Image

MODEL, MARK = "qwen3_vl", FAMILIES["qwen3_vl"].mark
TEMPLATE = (
    "{% for m in messages %}w9 {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}" + MARK + "{% else %} {{ p.text }}{% endif %}{% endfor %}{% endif %} </s>"
    "{% endfor %}w8 "
)
FIRST, SECOND = picture(1), picture(2, 32, 16)


def save_model(path: Path) -> None:
    save(MODEL, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def uri(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()
