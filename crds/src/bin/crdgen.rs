//! Prints the CustomResourceDefinition.

fn main() {
    print!("{}", replayfork_crds::crd_yaml());
}
