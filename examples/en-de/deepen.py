"""Give a trained model more encoder layers, which change nothing at first.

    python deepen.py en-de.safetensors deeper.safetensors --encoder-layers 6

Then `train.py --from deeper.safetensors` trains all layers. A layer is
LayerNorm(x + sublayer(x)) twice (section 5.4). In each new layer the matrices that end
both sublayers are 0, so x stays x. LayerNorm hardly changes what another one has
normalised; only the encoder's last one has a gain and a bias, those of the old one.

With --decoder-layers, only so many of the decoder's layers stay, the last ones. (One of
two has a loss of 3.37 after 250 updates, where the first one alone has 3.60.)
"""

import argparse
import dataclasses
import re
from pathlib import Path

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs.checkpoint import load, save
from minitransformer.runs.models import find_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    help = "a run, a checkpoint or a shipped model"
    parser.add_argument("model", type=Path, help=help)
    parser.add_argument("output", type=Path, help="the checkpoint to write")
    parser.add_argument("--encoder-layers", type=int, required=True)
    parser.add_argument("--decoder-layers", type=int, help="at most as many (default)")
    args = parser.parse_args()

    # A model of other depth: the first encoder and last decoder layers are old ones.
    checkpoint = load(find_checkpoint(args.model))
    config = checkpoint.model.config
    kept = args.decoder_layers or config.decoder_layers
    layers = {"encoder_layers": args.encoder_layers, "decoder_layers": kept}
    model = Transformer(dataclasses.replace(config, **layers), seed=1)
    old = dict(checkpoint.model.named_parameters())
    new = dict(model.named_parameters())
    first = config.decoder_layers - kept
    for name, parameter in old.items():
        name = re.sub(r"decoder\.(\d+)", lambda x: f"decoder.{int(x[1]) - first}", name)
        if name in new:
            new[name].data[...] = parameter.data

    # New layers add nothing, and the last normalisation moves to the end.
    for layer in range(config.encoder_layers, args.encoder_layers):
        new[f"encoder.{layer}.self_attention.output"].data[...] = 0
        new[f"encoder.{layer}.feed_forward.weight_2"].data[...] = 0
    last, end = (
        f"encoder.{layers - 1}.feed_forward_norm"
        for layers in (config.encoder_layers, args.encoder_layers)
    )
    for part, neutral in (("gain", 1), ("bias", 0)):
        new[f"{last}.{part}"].data[...] = neutral
        new[f"{end}.{part}"].data[...] = old[f"{last}.{part}"].data

    parameters = ParameterBuffer(model)
    deeper = dataclasses.replace(checkpoint, model=model, parameters=parameters)
    save(args.output, deeper)


if __name__ == "__main__":
    main()
