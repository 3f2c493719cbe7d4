"""Tiny models of packages for images, volumes, graphs and fields (`examples/try_packages.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROWS = 8


class Case(NamedTuple):
    """A model in training, its batch, and its loss if forward returns none."""

    model: nn.Module
    batch: dict[str, Any]
    loss_fn: Callable[[Any, Mapping[str, Any]], Tensor] | None = None


def squares(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """The mean of squares of every floating tensor in the outputs."""
    if isinstance(outputs, Tensor):
        return (outputs * outputs.conj()).real.mean()
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    found = [o for o in outputs if not isinstance(o, Tensor) or o.is_floating_point()]
    return torch.stack([squares(o, batch) for o in found if o is not None]).sum()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ids(n: int, *shape: int) -> Tensor:
    return torch.randint(1, n, shape)


class Entry(NamedTuple):
    package: str
    field: str
    make: Callable[[], Case]


def to_float64(model: nn.Module) -> nn.Module:
    """As `double()`, complex parameters too."""
    for p in (*model.parameters(), *model.buffers()):
        if p.is_floating_point() or p.is_complex():
            p.data = p.data.to(torch.complex128 if p.is_complex() else torch.float64)
    return model


def without_dropout(model: nn.Module) -> nn.Module:
    """Masks are not those of torch's own generator."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


# -- diffusion ------------------------------------------------------------------------------------


def unet_conditioned() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32),
        layers_per_block=1, cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    batch = {
        "sample": normal(ROWS, 4, 8, 8),
        "timestep": ids(1000, ROWS),
        "encoder_hidden_states": normal(ROWS, 6, 16),
    }
    return Case(model, batch, squares)


def sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    batch = {
        "hidden_states": normal(ROWS, 4, 8, 8),
        "encoder_hidden_states": normal(ROWS, 6, 16),
        "pooled_projections": normal(ROWS, 16),
        "timestep": ids(1000, ROWS),
    }
    return Case(model, batch, squares)


def flux() -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    batch = {
        "hidden_states": normal(ROWS, 16, 4),
        "encoder_hidden_states": normal(ROWS, 6, 16),
        "pooled_projections": normal(ROWS, 16),
        "timestep": torch.rand(ROWS, dtype=torch.float64),
        "img_ids": ids(8, 16, 3).double(),
        "txt_ids": torch.zeros(6, 3, dtype=torch.float64),
    }
    return Case(model, batch, squares)


def autoencoder_kl() -> Case:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, sample_size=16, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return Case(model, {"sample": normal(ROWS, 3, 16, 16)}, squares)


def pixart() -> Case:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=16, sample_size=8, caption_channels=12, norm_num_groups=4,
        use_additional_conditions=False,
    )  # fmt: skip
    batch = {
        "hidden_states": normal(ROWS, 4, 8, 8),
        "encoder_hidden_states": normal(ROWS, 6, 12),
        "timestep": ids(1000, ROWS),
    }
    return Case(model, batch, squares)


def unet_1d() -> Case:
    from diffusers import UNet1DModel

    model = UNet1DModel(
        sample_size=32, in_channels=2, out_channels=2, block_out_channels=(32, 32, 64),
        extra_in_channels=64, norm_num_groups=4,
    )  # fmt: skip
    return Case(model, {"sample": normal(ROWS, 2, 32), "timestep": ids(1000, ROWS)}, squares)


def vq_model() -> Case:
    from diffusers import VQModel

    model = VQModel(
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, num_vq_embeddings=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return Case(model, {"sample": normal(ROWS, 3, 16, 16)}, squares)


# -- segmentation of volumes ----------------------------------------------------------------------


def volume(model: nn.Module, *sizes: int, name: str = "x") -> Case:
    return Case(model, {name: normal(ROWS, 1, *sizes)}, squares)


def swin_unetr() -> Case:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, spatial_dims=2, window_size=4,
        depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2),
    )  # fmt: skip
    return volume(model, 64, 64, name="x_in")


def unetr() -> Case:
    from monai.networks.nets import UNETR

    model = UNETR(1, 2, (16, 16, 16), 4, hidden_size=16, mlp_dim=32, num_heads=2)
    return volume(model, 16, 16, 16, name="x_in")


def vnet() -> Case:
    from monai.networks.nets import VNet

    return volume(
        VNet(spatial_dims=2, in_channels=1, dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0)),
        16,
        16,
    )


def dyn_unet() -> Case:
    from monai.networks.nets import DynUNet

    model = DynUNet(
        2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(8, 16, 16), deep_supervision=True
    )
    return volume(model, 16, 16)


def attention_unet() -> Case:
    from monai.networks.nets import AttentionUnet

    return volume(AttentionUnet(2, 1, 2, (8, 16, 16), (2, 2)), 16, 16)


# -- graphs ---------------------------------------------------------------------------------------


class OnGraph(nn.Module):
    """A model over one graph that does not change: its tensors are buffers."""

    def __init__(self, model: nn.Module, **graph: Tensor) -> None:
        super().__init__()
        self.model, self.names = model, tuple(graph)
        for name, value in graph.items():
            self.register_buffer(name, value)

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs, **{name: getattr(self, name) for name in self.names})


def edges(n_nodes: int = 16, n_edges: int = 40) -> Tensor:
    return torch.randint(0, n_nodes, (2, n_edges))


def gat() -> Case:
    from torch_geometric.nn import GAT

    model = OnGraph(GAT(8, 16, 2, heads=2), edge_index=edges())
    return Case(model, {"x": normal(16, 8)}, squares)


def gin() -> Case:
    from torch_geometric.nn import GIN

    return Case(GIN(8, 16, 2), {"x": normal(16, 8), "edge_index": edges()}, squares)


def dense_sage() -> Case:
    from torch_geometric.nn import DenseSAGEConv

    batch = {"x": normal(ROWS, 6, 8), "adj": (torch.rand(ROWS, 6, 6) < 0.5).double()}
    return Case(DenseSAGEConv(8, 16), batch, squares)


class AllPairs(nn.Module):
    """The interaction graph of SchNet without torch-cluster: pairs within a molecule."""

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        row, col = torch.triu_indices(len(pos), len(pos), 1)
        same = batch[row] == batch[col]
        row, col = row[same], col[same]
        return torch.stack([row, col]), (pos[row] - pos[col]).norm(dim=-1)


def schnet() -> Case:
    from torch_geometric.nn import SchNet

    model = OnGraph(SchNet(16, 16, 2, 8, interaction_graph=AllPairs()), batch=torch.arange(12) // 6)
    return Case(model, {"z": ids(10, 12), "pos": normal(12, 3)}, squares)


def attentive() -> Case:
    from torch_geometric.nn.models import AttentiveFP

    model = OnGraph(AttentiveFP(8, 16, 4, 4, 2, 2), edge_index=edges(), batch=torch.arange(16) // 4)
    return Case(model, {"x": normal(16, 8), "edge_attr": normal(40, 4)}, squares)


def e3nn_gate() -> Case:
    from e3nn import o3

    class Equivariant(nn.Module):
        """Two tensor products with spherical harmonics, and a linear layer."""

        def __init__(self) -> None:
            super().__init__()
            self.harmonics = o3.SphericalHarmonics([0, 1], normalize=True)
            self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "0e + 1o", "4x0e + 2x1o")
            self.last = o3.Linear("4x0e + 2x1o", "4x0e")

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.last(self.product(x, self.harmonics(edges)))

    return Case(Equivariant(), {"x": normal(ROWS, 10), "edges": normal(ROWS, 3)}, squares)


# -- physics --------------------------------------------------------------------------------------


def field(model: nn.Module) -> Case:
    """The first call makes and keeps the grid of positions; traces read it."""
    x = normal(ROWS, 1, 8, 8)
    with torch.no_grad():
        to_float64(model)(x)
    return Case(model, {"x": x}, squares)


def fno() -> Case:
    from neuralop.models import FNO

    return field(FNO((4, 4), 1, 1, 8, n_layers=2))


def tfno() -> Case:
    from neuralop.models import TFNO

    return field(TFNO((4, 4), 1, 1, 8, n_layers=2, rank=0.5))


def uno() -> Case:
    from neuralop.models import UNO

    model = UNO(
        1, 1, 8, 16, 16, n_layers=3, uno_out_channels=[8, 8, 8], uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], channel_mlp_skip="linear",
    )  # fmt: skip
    return field(model)


def neural_ode() -> Case:
    from torchdyn.core import NeuralODE

    field = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    model = NeuralODE(field, solver="rk4", sensitivity="autograd")
    return Case(model, {"x": normal(ROWS, 4)}, lambda out, _: out[1][-1].square().mean())


SPACES: dict[str, Entry] = {
    "UNet2DConditionModel": Entry("diffusers", "diffusion", unet_conditioned),
    "SD3Transformer2DModel": Entry("diffusers", "diffusion", sd3),
    "FluxTransformer2DModel": Entry("diffusers", "diffusion", flux),
    "AutoencoderKL": Entry("diffusers", "diffusion", autoencoder_kl),
    "PixArtTransformer2DModel": Entry("diffusers", "diffusion", pixart),
    "UNet1DModel": Entry("diffusers", "diffusion", unet_1d),
    "VQModel": Entry("diffusers", "diffusion", vq_model),
    "SwinUNETR": Entry("monai", "segmentation", swin_unetr),
    "UNETR": Entry("monai", "segmentation", unetr),
    "VNet": Entry("monai", "segmentation", vnet),
    "DynUNet": Entry("monai", "segmentation", dyn_unet),
    "AttentionUnet": Entry("monai", "segmentation", attention_unet),
    "GAT": Entry("torch-geometric", "graph", gat),
    "GIN": Entry("torch-geometric", "graph", gin),
    "DenseSAGEConv": Entry("torch-geometric", "graph", dense_sage),
    "SchNet": Entry("torch-geometric", "graph", schnet),
    "AttentiveFP": Entry("torch-geometric", "graph", attentive),
    "FullyConnectedTensorProduct": Entry("e3nn", "physics", e3nn_gate),
    "FNO": Entry("neuraloperator", "physics", fno),
    "TFNO": Entry("neuraloperator", "physics", tfno),
    "UNO": Entry("neuraloperator", "physics", uno),
    "NeuralODE": Entry("torchdyn", "physics", neural_ode),
}
