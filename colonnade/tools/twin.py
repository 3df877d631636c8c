"""The tiny twin of a model, as the tools use it. It is made in `colonnade.model.twin`, where inference finds it as well."""

from colonnade.model.twin import MAX_LAYERS, VOCAB, WINDOW, build, model_class, shrink, twin_model

__all__ = ["MAX_LAYERS", "VOCAB", "WINDOW", "build", "model_class", "shrink", "twin_model"]
