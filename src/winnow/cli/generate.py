"""`winnow generate`: one prompt, its answer streamed to the terminal."""

import argparse
import sys
from contextlib import closing

from winnow.cli.flags import engine
from winnow.cli.prompt import read_prompt

DESCRIPTION = "Stream the answer to one prompt to the terminal."
EPILOG = """\
examples:
  winnow generate "The capital of France is" --max-tokens 20
  winnow generate "Tom likes chess. Question: What does Tom like? Answer:" --model demo
  winnow generate --chat "Who was Ada Lovelace?" --model path/to/model
  winnow generate "A colour:" --structured-outputs '{"choice": ["red", "blue"]}'
  cat article.txt | winnow generate - --temperature 0.7 --seed 1
"""

DEMO_NOTE = (
    "winnow: this is the demo model, which answers questions about facts in its prompt, such as "
    "'The hobby of Tom is chess. Question: What is the hobby of Tom? Answer:', and writes poor prose"
)
_OF_ONE_REQUEST = ("context_tokens", "structured_outputs")
# More than the 16 tokens that are the default of a request.
_DEFAULTS = {"max_tokens": 256}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow generate PROMPT [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    engine.add_engine_flags(parser)
    engine.add_sampling_flags(
        parser, "sampling", skip=engine.OF_SEVERAL, defaults=_DEFAULTS, also=_OF_ONE_REQUEST
    )


def execute(namespace: argparse.Namespace) -> int:
    typed = engine.sampling_options(namespace, _OF_ONE_REQUEST)
    prompt = read_prompt(namespace.prompt)
    options = engine.usual_model(namespace, engine.engine_options(namespace))
    if options.get("model") is None:
        print(DEMO_NOTE, file=sys.stderr)
        options.setdefault("threads", 1)  # one row of a model this small gains nothing from a second
    with engine.open_llm(options) as llm:
        print(engine.memory_line(llm), file=sys.stderr)
        params = engine.conversation_params(llm, _DEFAULTS, typed)
        if namespace.chat:
            outputs = llm.stream_chat([{"role": "user", "content": prompt}], params)
        else:
            outputs = llm.stream(prompt, params)
        shown = 0
        # A reader who leaves ends the request, while there still is an engine to end it in.
        with closing(engine.with_speed(llm, outputs)) as answers:
            for output in answers:
                text = output.outputs[0].text
                print(text[shown:], end="", flush=True)
                shown = len(text)
    print()
    output.raise_for_error()
    return 0
