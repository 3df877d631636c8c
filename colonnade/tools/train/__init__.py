"""Training and fine-tuning of causal language models on local text: what `colonnade train` does.

`TrainOptions` says what is wanted, `prepare` checks it and turns text into tokens, `train_on_this_rank` is the run
itself. Where to begin reading: recipe.py.
"""
