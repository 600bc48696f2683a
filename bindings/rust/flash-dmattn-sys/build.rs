//! Where the library is: the folder FLASH_DMATTN_LIB_DIR, else what pkg-config says.
use std::env;
use std::process::{exit, Command};

fn main() {
    println!("cargo:rerun-if-env-changed=FLASH_DMATTN_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    println!("cargo:rustc-link-lib=dylib=flash_dmattn");
    if let Some(folder) = env::var_os("FLASH_DMATTN_LIB_DIR") {
        println!("cargo:rustc-link-search=native={}", folder.to_string_lossy());
        return;
    }
    let tool = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    match Command::new(tool).args(["--libs-only-L", "flash_dmattn"]).output() {
        Ok(said) if said.status.success() => {
            for folder in String::from_utf8_lossy(&said.stdout).split_whitespace() {
                println!("cargo:rustc-link-search=native={}", folder.trim_start_matches("-L"));
            }
        }
        _ => {
            eprintln!(
                "pkg-config does not know flash_dmattn: install the library, or set FLASH_DMATTN_LIB_DIR to its folder"
            );
            exit(1);
        }
    }
}
