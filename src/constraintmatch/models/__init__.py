"""Networks: backbones and heads as `ClusterModel`, the model folder, batch norm by parts."""
