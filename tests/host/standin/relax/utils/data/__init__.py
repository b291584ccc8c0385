from relax.standin.line import variant_paths

__path__ += variant_paths("utils/data")
