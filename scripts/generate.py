"""Write some text with a saved model: plain transformers, one process, nothing of Colonnade.

python scripts/generate.py FOLDER ["the beginning of the text"]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder, beginning = sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "def __init__(self"
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(beginning, return_tensors="pt", add_special_tokens=False)["input_ids"]
    torch.manual_seed(0)
    with torch.no_grad():
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=True, top_k=20, temperature=0.7
        )
    print(f"\n{type(model).__name__} from {folder}, loaded by transformers alone, continues {beginning!r}:\n")
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
